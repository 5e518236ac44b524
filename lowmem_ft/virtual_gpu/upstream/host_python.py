"""Python that torch runs between operators, counted as the operators that keep the host about as long.

The numbers are those of ``scripts/calibrate host`` on a CPU (AMD EPYC, one thread, torch 2.13, 2026-11-27), in
operators: 2.2 to 3.3 for a pass of an autograd function in fused adapters and in sums inside products, 4.8 to 5.6 in
MLPs in tiles; 1.2 to 1.3 for a hook on a saved tensor, with the layer's own context managers: a checkpointed layer
calls three for each tensor that it would save; 1.5 to 2.0 for an operator that a dispatch mode of selective
checkpointing looks at; 1.3 to 1.4 for the Python between an operator of bitsandbytes and its kernel.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction, Function
from torch.autograd.graph import saved_tensors_hooks

from lowmem_ft.foundation.upstream.patches import wrap

Kind = Literal["pass", "hook", "short hook", "dispatch", "bitsandbytes"]
OPERATORS: dict[Kind, float] = {
    "pass": 3.0,
    "hook": 1.2,
    "short hook": 0.6,
    "dispatch": 1.6,
    "bitsandbytes": 1.3,
}
"""Operators that each is worth: a pass of an autograd function written in Python, in addition to its own; a call of a
hook on a saved tensor, and of one whose attribute ``host_python`` says that it is short; a call of a selective
checkpoint's dispatch mode; the Python around a kernel of bitsandbytes."""

_PASSES = ((Function, "apply"), (BackwardCFunction, "apply"), (BackwardCFunction, "apply_boxed"))
"""Methods that run the forward pass, and, by the version of torch, the backward pass."""
_MODES = (torch.utils.checkpoint._CachingTorchDispatchMode, torch.utils.checkpoint._CachedTorchDispatchMode)


@contextlib.contextmanager
def host_python_counted(count: Callable[[Kind], None]) -> Iterator[None]:
    """Call ``count`` at the beginning of each such piece of Python in a block."""
    with contextlib.ExitStack() as undo:
        for owner, name in _PASSES:
            if name != "apply_boxed" or hasattr(owner, name):  # since torch 2.13, if not earlier
                wrap(undo, owner, name, functools.partial(_counted, functools.partial(count, "pass")))
        for mode in _MODES:
            wrap(undo, mode, "__torch_dispatch__", functools.partial(_dispatched, count))
        wrap(undo, saved_tensors_hooks, "__init__", functools.partial(_with_counted_hooks, count))
        yield


def python_around(func: Any) -> float:
    """Return what Python around an operator's kernel is worth: bitsandbytes calls its kernels by ``ctypes``."""
    return OPERATORS["bitsandbytes"] if _namespace(func) == "bitsandbytes" else 0.0


def _counted(count: Callable[[], None], run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    count()
    return run(*args, **kwargs)


def _dispatched(
    count: Callable[[Kind], None], run: Callable[..., Any], mode: Any, func: Any, *args: Any, **kwargs: Any
) -> Any:
    if _namespace(func) != "prim":  # a fake tensor's device is asked for this way, a real one's is not
        count("dispatch")
    return run(mode, func, *args, **kwargs)


def _namespace(func: Any) -> str:
    return getattr(func, "namespace", "")  # an operator of higher order has none


def _with_counted_hooks(
    count: Callable[[Kind], None],
    initialize: Callable[..., None],
    hooks: saved_tensors_hooks,
    pack_hook: Callable[[Any], Any],
    unpack_hook: Callable[[Any], Any],
) -> None:
    kind: Kind = getattr(pack_hook, "host_python", "hook")

    def counted(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return functools.partial(_counted, functools.partial(count, kind), hook)

    initialize(hooks, counted(pack_hook), counted(unpack_hook))
