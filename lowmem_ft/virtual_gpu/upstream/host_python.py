"""Python that torch runs between operators, counted as the operators that keep the host about as long.

The numbers are those of ``scripts/measure_host.py`` on a CPU (AMD EPYC, one thread, torch 2.13, 2026-11-27), in
operators: 2.8 to 3.3 for a pass of an autograd function in fused adapters and in sums inside products, 5.1 to 5.6 in
MLPs in tiles; 1.2 to 1.3 for a hook on a saved tensor, with the layer's own context managers: a checkpointed layer
calls three for each tensor that it would save; 1.8 to 2.0 for an operator that a dispatch mode of selective
checkpointing looks at; 1.4 for the Python between an operator of bitsandbytes and its kernel.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction, Function
from torch.autograd.graph import saved_tensors_hooks

from lowmem_ft.upstream.patches import wrap

PASS, HOOK, DISPATCH, BITSANDBYTES = 3.0, 1.2, 2.0, 1.5
"""Operators that a pass of an autograd function written in Python is worth, in addition to its own; a call of a hook on
a saved tensor; a call of a selective checkpoint's dispatch mode; the Python around a kernel of bitsandbytes."""

_CALLS = (
    (Function, "apply", PASS),
    (BackwardCFunction, "apply", PASS),  # or, by the version of torch, the next
    (BackwardCFunction, "apply_boxed", PASS),
)
_MODES = (torch.utils.checkpoint._CachingTorchDispatchMode, torch.utils.checkpoint._CachedTorchDispatchMode)
_SINCE_TORCH_2_13 = "apply_boxed"


@contextlib.contextmanager
def host_python_counted(count: Callable[[float], None]) -> Iterator[None]:
    """Call ``count`` with the number of operators at the beginning of each such piece of Python in a block."""
    with contextlib.ExitStack() as undo:
        for owner, name, operators in _CALLS:
            if name != _SINCE_TORCH_2_13 or hasattr(owner, name):
                wrap(undo, owner, name, functools.partial(_counted, functools.partial(count, operators)))
        for mode in _MODES:
            wrap(undo, mode, "__torch_dispatch__", functools.partial(_dispatched, count))
        wrap(undo, saved_tensors_hooks, "__init__", functools.partial(_with_counted_hooks, count))
        yield


def python_around(func: Any) -> float:
    """Return what Python around an operator's kernel is worth: bitsandbytes calls its kernels by ``ctypes``."""
    return BITSANDBYTES if getattr(func, "namespace", "") == "bitsandbytes" else 0.0


def _counted(count: Callable[[], None], run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    count()
    return run(*args, **kwargs)


def _dispatched(
    count: Callable[[float], None], run: Callable[..., Any], mode: Any, func: Any, *args: Any, **kwargs: Any
) -> Any:
    if func.namespace != "prim":  # a fake tensor's device is asked for this way, a real one's is not
        count(DISPATCH)
    return run(mode, func, *args, **kwargs)


def _with_counted_hooks(
    count: Callable[[float], None],
    initialize: Callable[..., None],
    hooks: saved_tensors_hooks,
    pack_hook: Callable[[Any], Any],
    unpack_hook: Callable[[Any], Any],
) -> None:
    def counted(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return functools.partial(_counted, functools.partial(count, HOOK), hook)

    initialize(hooks, counted(pack_hook), counted(unpack_hook))
