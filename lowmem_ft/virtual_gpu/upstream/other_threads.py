"""Operators on a virtual GPU's tensors in a thread of the program's own: seen by nobody there, and so refused."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lowmem_ft.errors import UserError
from lowmem_ft.upstream.patches import replace
from lowmem_ft.virtual_gpu.values.questions import asking_line

_QUESTIONS = frozenset({torch.ops.prim.device.default, torch.ops.aten.is_pinned.default})


@contextlib.contextmanager
def operators_of_one_thread() -> Iterator[None]:
    """Refuse those of other threads than this one in a block, in which torch's modes do not follow the program.

    Raises:
        UserError: in the other thread, and again at the end of the block: nobody else may hear of it.
    """
    thread, dispatch = threading.get_ident(), FakeTensor.__torch_dispatch__
    problems: list[str] = []

    def checked(
        cls: type, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}
    ) -> Any:
        if threading.get_ident() != thread and func not in _QUESTIONS:
            problems.append(
                f"A virtual GPU follows the thread that its block began in, got {func} in another, at "
                f"{asking_line()}. Call it in the block's own thread; on a GPU it can go back to the other."
            )
            raise UserError(problems[-1])
        return dispatch(func, types, args, kwargs)

    with contextlib.ExitStack() as undo:
        replace(undo, FakeTensor, "__torch_dispatch__", classmethod(checked))
        yield
    if problems:
        raise UserError(problems[0])
