"""Refusal of a virtual GPU in threads that the program starts, as the trace cannot see their work."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.upstream.patches import replace
from lowmem_ft.virtual_gpu.values.questions import asking_line

_QUESTIONS = frozenset({torch.ops.prim.device.default, torch.ops.aten.is_pinned.default})

_blocks: list[tuple[int, list[str]]] = []
"""Active blocks: the thread of each, and the calls refused in other threads."""


def refuse_in_other_threads(what: object) -> None:
    """Raise, unless this is the thread in which the innermost block has begun.

    Raises:
        UserError: otherwise.
    """
    if _blocks and threading.get_ident() != _blocks[-1][0]:
        problem = (
            f"A virtual GPU follows the thread that its block began in, got {what} in another, at "
            f"{asking_line()}. Call it in the block's own thread; on a GPU it can go back to the other."
        )
        _blocks[-1][1].append(problem)
        raise UserError(problem)


@contextlib.contextmanager
def followed_thread() -> Iterator[None]:
    """Let a virtual GPU follow the operators, waits and reads of this thread in a block, as torch's modes do.

    Raises:
        UserError: in another thread, and again at the end of the block, as the first error may go unnoticed.
    """
    dispatch = FakeTensor.__torch_dispatch__

    def checked(
        cls: type, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}
    ) -> Any:
        if func not in _QUESTIONS:
            refuse_in_other_threads(func)
        return dispatch(func, types, args, kwargs)

    problems: list[str] = []
    _blocks.append((threading.get_ident(), problems))
    with contextlib.ExitStack() as undo:
        undo.callback(_blocks.pop)
        replace(undo, FakeTensor, "__torch_dispatch__", classmethod(checked))
        yield
    if problems:
        raise UserError(problems[0])
