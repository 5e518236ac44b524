"""What keeps torch and transformers from treating fake tensors otherwise than real ones.

Each patch holds for the length of a ``with`` block.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class FakeMode(FakeTensorMode):
    """Fake tensors whose known values never leave the host: ``torch.tensor([4], device="vgpu")`` copies nothing."""

    @property
    def avoid_device_init(self) -> bool:
        """As without a device: tensors are filled on the host and then copied."""
        return True


@contextlib.contextmanager
def fake_tensors_in_disguise() -> Iterator[None]:
    """All of the patches below."""
    with (
        _replaced("transformers.utils.import_utils", "is_fake_tensor", _never),
        _replaced("torch.utils", "swap_tensors", _swap_tensors),
        _foreach_takes_fake_tensors(),
    ):
        yield


@contextlib.contextmanager
def _replaced(module_name: str, name: str, replacement: Any) -> Iterator[None]:
    """Another function under that name, if the module is imported and has it."""
    module = sys.modules.get(module_name)
    original = getattr(module, name, None)
    if original is None:
        yield
        return
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)


def _never(tensor: Any) -> bool:
    """Transformers takes other paths when it meets a fake tensor: masks in full, and so other attention kernels."""
    return False


def _swap_tensors(first: Tensor, second: Tensor) -> None:
    """``Module.to`` puts fake parameters in place by swapping; torch refuses, as fake tensors are weakly referenced."""
    for name in ("__class__", "__dict__"):
        of_first, of_second = getattr(first, name), getattr(second, name)
        setattr(first, name, of_second)
        setattr(second, name, of_first)
    torch._C._swap_tensor_impl(first, second)


@contextlib.contextmanager
def _foreach_takes_fake_tensors() -> Iterator[None]:
    """Torch's multi-tensor operators are for a list of types; a fake tensor stands for one of them."""
    modules = (sys.modules["torch.utils._foreach_utils"], sys.modules["torch.optim.optimizer"])
    lists = [module._foreach_supported_types for module in modules]
    for supported in lists:
        supported.append(FakeTensor)
    try:
        yield
    finally:
        for supported in lists:
            supported.remove(FakeTensor)
