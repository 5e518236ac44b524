"""Sums of gradients as autograd's engine makes them: into the first of two, where nobody else holds it.

Where a dispatch mode watches, the engine does not trust itself to write in place and takes a new buffer for each sum.
Whoever watches counts that buffer as the first one's memory, and leaves the sum itself as the engine asks for it.

How many references the engine alone holds, and that no Python lies between it and the mode, is read from what torch
does not document. It decides what is counted and nothing else: guessed wrong, a count of bytes is off by one gradient,
and every number that the program computes is the same.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import torch
import torch.autograd.graph
from torch import Tensor

aten = torch.ops.aten

_ENGINE: CodeType = torch.autograd.graph._engine_run_backward.__code__
_WRAPPERS = ("_compile.py", "eval_frame.py")
"""Files of torch whose functions lie around every call of a dispatch mode."""

_USES_OF_TENSOR, _USES_OF_STORAGE = 4, 2
"""References in C++ to a tensor that only the engine holds, while a dispatch mode looks at it."""


def is_in_place_unwatched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the engine would have summed into ``args[0]`` if nobody watched. Ask in ``__torch_dispatch__`` itself.

    Source: pytorch, torch/csrc/autograd/input_buffer.cpp, accumulate.

    Args:
        func: the operator that it calls.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    is_sum = func is aten.add.Tensor and len(args) == 2 and not kwargs
    return is_sum and not torch.is_grad_enabled() and _is_held_once(args[0]) and _engine_calls()


def take_as_much(total: Tensor, first: Tensor) -> None:
    """Make a sum's storage as large as the one it is counted for, of which a gradient may be a part."""
    size_bytes = first.untyped_storage().nbytes()
    if total.untyped_storage().nbytes() < size_bytes:  # never smaller: the sum lies in it
        total.untyped_storage().resize_(size_bytes)


def _is_held_once(tensor: Any) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor._use_count() == _USES_OF_TENSOR  # type: ignore[attr-defined]
        and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == _USES_OF_STORAGE  # type: ignore[attr-defined]
        and _is_dense(tensor)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie end to end in some order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _engine_calls() -> bool:
    """Whether the engine itself calls the operator, rather than a backward pass written in Python."""
    if torch._C._current_graph_task_id() == -1:
        return False
    frame: FrameType | None = sys._getframe(3)  # who called the dispatch mode
    while frame is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        frame = frame.f_back
    return frame is not None and frame.f_code is _ENGINE
