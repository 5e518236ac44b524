"""Places in a program where each live storage was made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lowmem_ft.foundation.tensors.live_tensors import live_tensors, storage_key
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
"""Folders whose frames are skipped, up to the frame of the program that called them."""

UNSEEN = "(not made by an operator of torch)"
"""The place of a storage that no operator made: from NumPy, from another process, from before."""


class Birth(NamedTuple):
    """One storage, described by its first tensor.

    Attributes:
        site: file, line and function.
        shape: shape of that tensor.
        dtype: type of that tensor.
        device: device of that tensor.
        num_bytes: bytes of the storage.
        step: number of steps that had ended.
    """

    site: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    num_bytes: int
    step: int


class BirthTracker(StorageTracker):
    """A tracker of all devices that remembers where storages come from.

    Attributes:
        births: births of live storages, by :func:`~lowmem_ft.foundation.tensors.live_tensors.storage_key`, the oldest
            first.
        step: the step written into births from now on.
    """

    def __init__(self) -> None:
        super().__init__(device_type=None)
        self.births: dict[int, Birth] = {}
        self.step = 0
        self._site: str | None = None

    def add_what_python_knows(self) -> None:
        """Count tensors that no operator made in this block."""
        self._site = UNSEEN
        for tensor in live_tensors():
            self.add(tensor)
        self._site = None

    def is_new(self, tensor: Tensor) -> None:
        """See :class:`StorageTracker`."""
        self.births[storage_key(tensor)] = Birth(
            self._site or _running_site(),
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            str(tensor.device),
            tensor.untyped_storage().nbytes(),
            self.step,
        )

    def _release(self, key: int) -> None:
        self.births.pop(key, None)
        super()._release(key)


def _running_site() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    code = frame.f_code
    if code.co_filename.startswith(_LIBRARIES):
        return "(autograd's own thread)"
    return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
