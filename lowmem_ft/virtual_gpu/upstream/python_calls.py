"""Count of the passes of autograd functions written in Python, which keep the host longer than an operator does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.autograd.function import BackwardCFunction, Function

from lowmem_ft.upstream.patches import wrap

_PASSES = ((Function, "apply"), (BackwardCFunction, "apply"), (BackwardCFunction, "apply_boxed"))
"""Methods that run the forward pass, and, by the version of torch, the backward pass."""


@contextlib.contextmanager
def python_calls_counted(count: Callable[[], None]) -> Iterator[None]:
    """Call ``count`` at the beginning of each such pass in a block."""
    with contextlib.ExitStack() as undo:
        for owner, name in _PASSES:
            if name != "apply_boxed" or hasattr(owner, name):  # since torch 2.13, if not earlier
                wrap(undo, owner, name, functools.partial(_counted, count))
        yield


def _counted(count: Callable[[], None], run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    count()
    return run(*args, **kwargs)
