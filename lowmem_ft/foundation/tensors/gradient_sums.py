"""Gradients as autograd's engine writes them: in place, into the first of two or into zeros, if nothing else holds it.

Under a dispatch mode the engine does not dare to write in place and takes a new buffer for each sum, and for each
gradient of ``gather``, indexing, ``max`` or ``sort``, which is written into zeros. A tracker counts that buffer as the
first one's memory, and leaves the operator itself as the engine called it.

The number of references that only the engine holds, and the absence of Python frames between it and the mode, come from
undocumented parts of torch. They decide only what is counted: if they are wrong, a count of bytes is off by one
gradient, and every number that the program computes is the same.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import torch
import torch.autograd.graph
from torch import Tensor

from lowmem_ft.foundation.tensors.backward_detection import is_in_backward

aten = torch.ops.aten

_ENGINE: CodeType = torch.autograd.graph._engine_run_backward.__code__
_WRAPPERS = ("_compile.py", "eval_frame.py")
"""Files of torch whose functions surround every call of a dispatch mode."""

_USES_OF_TENSOR, _USES_OF_STORAGE = 4, 2
"""References in C++ to a tensor that only the engine holds, seen from within a dispatch mode."""

_IN_PLACE: dict[Any, tuple[Any, int]] = {
    aten.add.Tensor: (aten.add_.Tensor, _USES_OF_TENSOR),
    aten.scatter_add.default: (aten.scatter_add_.default, _USES_OF_TENSOR),
    aten.scatter.src: (aten.scatter_.src, _USES_OF_TENSOR),
    aten.index_add.default: (aten.index_add_.default, _USES_OF_TENSOR),
    aten.index_put.default: (aten.index_put_.default, _USES_OF_TENSOR + 1),
    aten.masked_scatter.default: (aten.masked_scatter_.default, _USES_OF_TENSOR),
}
"""Operators that the engine calls under a mode: what it calls otherwise, and the references to the first operand."""


def called_unwatched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what the engine would call unwatched: the operator that writes into ``args[0]``, or the same.

    Call it within ``__torch_dispatch__``.

    Source: pytorch, torch/csrc/autograd/input_buffer.cpp, accumulate; FunctionsManual.cpp, areAnyTensorSubclassLike.

    Args:
        func: the operator that it calls.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    if func not in _IN_PLACE or kwargs or (func is aten.add.Tensor and len(args) != 2):
        return func
    in_place, uses = _IN_PLACE[func]
    is_own = not torch.is_grad_enabled() and _is_held_once(args[0], uses) and _engine_calls()
    return in_place if is_own else func


def take_as_much(total: Tensor, first: Tensor) -> None:
    """Make a sum's storage as large as the one that it replaces in the count, of which a gradient may be a part."""
    size_bytes = first.untyped_storage().nbytes()
    if total.untyped_storage().nbytes() < size_bytes:  # never smaller: it holds the sum
        total.untyped_storage().resize_(size_bytes)


def _is_held_once(tensor: Any, uses: int) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor._use_count() == uses  # type: ignore[attr-defined]
        and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == _USES_OF_STORAGE  # type: ignore[attr-defined]
        and _is_dense(tensor)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements are contiguous in some order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _engine_calls() -> bool:
    """Return whether the engine itself calls the operator, rather than a backward pass written in Python."""
    if not is_in_backward():
        return False
    frame: FrameType | None = sys._getframe(3)  # the caller of the dispatch mode
    while frame is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        frame = frame.f_back
    return frame is not None and frame.f_code is _ENGINE
