"""The live tensors of this process, found through Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor


def live_tensors(objects: list[object] | None = None) -> Iterator[Tensor]:
    """Yield each tensor with memory of its own or a view of some: not those on ``meta``, nor sparse ones.

    Args:
        objects: objects to search; None: all that the garbage collector knows.
    """
    for thing in gc.get_objects() if objects is None else objects:
        # The type itself and not isinstance, which reads a proxy's `__class__` and so wakes lazy ones.
        if issubclass(type(thing), Tensor):
            tensor = cast(Tensor, thing)
            if has_storage(tensor):
                yield tensor


def has_storage(tensor: Tensor) -> bool:
    """Return whether bytes can be counted: the insides of sparse tensors and of some subclasses cannot."""
    if tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return False
    try:
        return tensor.untyped_storage().nbytes() > 0
    except (NotImplementedError, RuntimeError):
        return False


def storage_key(tensor: Tensor) -> int:
    """Return a key of the storage, the same for every tensor that shares it."""
    return tensor.untyped_storage()._cdata
