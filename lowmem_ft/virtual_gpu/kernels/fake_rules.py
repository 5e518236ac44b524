"""Fake rules for operators of torch that have none, or whose steps depend on the device being CUDA."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_IN_PLACE = ("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adagrad_", "_fused_adagrad_.tensor_lr")
"""Optimizer steps in one kernel, which write into their arguments and return nothing."""

_ONE_KERNEL = ("silu_backward",)
"""Kernels of CUDA that torch replaces by several, with memory between them, on a device without that kernel."""

_library = torch.library.Library("aten", "IMPL")


def register_fake_rules() -> None:
    """Register the missing rules with torch, once per process."""
    for name in _IN_PLACE:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            _library.impl(name, _nothing, "Meta")
    for name in _ONE_KERNEL:
        _library.impl(name, _like_first, "PrivateUse1")
    _library.impl("softmax.int", functools.partial(_softmax, aten._softmax), "AutogradPrivateUse1")
    _library.impl("log_softmax.int", functools.partial(_softmax, aten._log_softmax), "AutogradPrivateUse1")


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _like_first(tensor: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(tensor)


def _softmax(kernel: Any, tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Cast as CUDA does: its kernel turns float16 into float32 itself; in other cases a cast copy comes first.

    Source: pytorch, aten/src/ATen/native/SoftMax.cpp.
    """
    if tensor.dtype == torch.float16 and dtype == torch.float32:
        return kernel(tensor, dim, True)
    return kernel(tensor if dtype is None else tensor.to(dtype), dim, False)
