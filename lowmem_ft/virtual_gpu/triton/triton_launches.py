"""Launches of Triton kernels on the virtual GPU: nothing is compiled or run, and the trace sees one operator each.

Grids, heuristics and hooks are a program's own Python and run as they are. An autotuner takes the first configuration
that it may choose from, as if all were equally fast, and for that once takes the buffer that its timings take.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from lowmem_ft.foundation.devices import is_virtual
from lowmem_ft.foundation.upstream.import_hooks import when_any_imported, when_imported, wrap_when_imported
from lowmem_ft.foundation.upstream.patches import existing, replace, wrap
from lowmem_ft.foundation.virtual_device import DEVICE_TYPE
from lowmem_ft.virtual_gpu.triton.triton_driver import VirtualDriver, benchmark
from lowmem_ft.virtual_gpu.triton.triton_kernels import launch, tensors_of
from lowmem_ft.virtual_gpu.triton.triton_stand_in import importable

LIBRARIES = ("liger_kernel", "fla", "unsloth.kernels")
"""Libraries of Triton kernels whose code asks whether a tensor's device is of the type ``cuda``."""
_WITHOUT_TRITON = LIBRARIES[0]
"""Imported with the stand-in where Triton is not installed; the others reach into Triton's and torch's internals."""


def triton_as_on_cuda(undo: contextlib.ExitStack) -> None:
    """Let launches of Triton kernels be traced until a stack is undone, whether Triton is imported before or later."""
    for module, owner, name, around in (
        ("triton.runtime.jit", "JITFunction", "run", _launch_compiled),
        ("triton.runtime.interpreter", "InterpretedFunction", "run", _launch_interpreted),
        ("triton.runtime.autotuner", "Autotuner", "run", _Tuning().run),
        ("triton.runtime.autotuner", "Autotuner", "_bench", _bench),
        ("triton.runtime.autotuner", "Autotuner", "check_disk_cache", _without_disk),
    ):
        when_imported(undo, module, functools.partial(_wrap, undo, owner, name, around))
    when_imported(undo, "triton.runtime.driver", functools.partial(_lend_driver, undo))
    rename = functools.partial(_names_device, undo)
    is_here = importlib.util.find_spec("triton") is not None
    when_any_imported(undo, (_WITHOUT_TRITON,), rename, contextlib.nullcontext if is_here else importable)
    when_any_imported(undo, LIBRARIES[1:], rename)
    if not is_here:
        wrap_when_imported(
            undo, "liger_kernel.backends.capability", "Capability", "_evaluate", _with_stand_in
        )


def _wrap(undo: contextlib.ExitStack, owner: str, name: str, around: Callable[..., Any], module: Any) -> None:
    wrap(undo, existing(module, owner), name, around)


def _launch_compiled(
    run: Callable[..., Any], kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any
) -> None:
    if not warmup:
        launch(kernel, grid, args, kwargs)


def _launch_interpreted(
    run: Callable[..., Any], kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any
) -> Any:
    """Launch under ``TRITON_INTERPRET``: record launches on virtual tensors, interpret those on the host."""
    if any(is_virtual(tensor.device) for tensor in tensors_of((*args, *kwargs.values()))):
        return _launch_compiled(run, kernel, *args, grid=grid, warmup=warmup, **kwargs)
    return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)


class _Tuning:
    """Autotuner caches for a block: hides the choices made for a real GPU, and discards those made in the block."""

    def __init__(self) -> None:
        self._chosen: dict[Any, dict[Any, Any]] = {}

    def run(self, run: Callable[..., Any], tuner: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an autotuner with the block's choices."""
        kept, tuner.cache = tuner.cache, self._chosen.setdefault(tuner, {})
        try:
            return run(tuner, *args, **kwargs)
        finally:
            tuner.cache = kept


def _bench(bench: Callable[..., Any], tuner: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
    return benchmark(quantiles=(0.5, 0.2, 0.8))


def _without_disk(
    check: Callable[..., Any], tuner: Any, key: Any, configs: Any, measure: Callable[[], None]
) -> bool:
    measure()
    return False


def _with_stand_in(evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Let Liger find Triton where it asks which of its kernels can run."""
    with importable():
        return evaluate(*args, **kwargs)


def _lend_driver(undo: contextlib.ExitStack, module: Any) -> None:
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]

    replace(undo, existing(module, "driver"), "_active", VirtualDriver(GPUTarget))


def _names_device(undo: contextlib.ExitStack, module: Any) -> None:
    """Let ``tensor.device.type == "cuda"`` in a module's functions mean the virtual GPU, whose tensors say its name."""
    for function in _functions(module):
        code = function.__code__
        changed = _renamed(code)
        if changed is not code:
            undo.callback(setattr, function, "__code__", code)
            function.__code__ = changed


def _functions(module: Any) -> list[FunctionType]:
    owners = [module, *(one for one in vars(module).values() if isinstance(one, type))]
    found = [getattr(one, "__func__", one) for owner in owners for one in vars(owner).values()]
    found += [one.__wrapped__ for one in found if hasattr(one, "__wrapped__")]
    return [one for one in found if isinstance(one, FunctionType) and one.__module__ == module.__name__]


def _renamed(code: CodeType) -> CodeType:
    constants = tuple(_renamed(one) if isinstance(one, CodeType) else one for one in code.co_consts)
    if {"device", "type"} <= {*code.co_names, *code.co_varnames}:
        constants = tuple(map(_renamed_constant, constants))
    return code if constants == code.co_consts else code.replace(co_consts=constants)


def _renamed_constant(constant: Any) -> Any:
    if isinstance(constant, (tuple, frozenset)):
        return type(constant)(map(_renamed_constant, constant))
    return DEVICE_TYPE if constant == "cuda" else constant
