"""The parts of a program that it compiles by ``torch.compile``: they run as they are written, so they are remembered.

Dynamo leaves every call alone under a dispatch mode, such as a recorder: what is compiled needs what the same program
needs uncompiled. ``fullgraph=True`` asks for an error then, and is not passed on.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lowmem_ft.foundation.upstream.patches import wrap
from lowmem_ft.virtual_gpu.values.questions import is_of_library, shown_line

_RUN_AS_WRITTEN = ("eager", "eager_noexcept", "eager_debug")
"""Backends that compile nothing."""

_Part = tuple[str, str]
"""Name of a class or function, and the line that compiles it."""


class CompiledCode:
    """The parts of a program that it compiles and calls, by whichever way it asks for it."""

    def __init__(self) -> None:
        self._called: dict[_Part, set[int]] = {}
        self._modules: weakref.WeakKeyDictionary[nn.Module, _Part] = weakref.WeakKeyDictionary()
        self._numbers: Counter[_Part] = Counter()

    @property
    def is_called(self) -> bool:
        """True once a compiled part was called."""
        return bool(self._called)

    def apply(self, undo: contextlib.ExitStack) -> None:
        """Remember what is compiled from now on, until a stack is undone."""
        wrap(undo, torch, "compile", self._compile)
        undo.callback(register_module_forward_pre_hook(self._before_forward).remove)

    def in_words(self) -> str:
        """Return a note on what is compiled; nothing if nothing was called."""
        if not self._called:
            return ""
        parts = []
        for (name, line), called in self._called.items():
            times = f"{len(called)} x " if len(called) > 1 else ""
            parts.append(f"{times}{name} ({line})")
        return (
            f"torch.compile: {', '.join(parts)}, estimated as it runs uncompiled; the ranges are wider by what "
            "compiling may change"
        )

    def _compile(self, compile: Callable[..., Any], model: Any = None, **options: Any) -> Any:
        if model is None:  # a decorator, which calls this again
            return compile(None, **options)
        compiled = compile(model, **{**options, "fullgraph": False})
        is_off = options.get("disable") or torch._dynamo.config.disable
        if is_off or options.get("backend") in _RUN_AS_WRITTEN:
            return compiled
        part = _name_of(model), _asking_line()
        self._numbers[part] += 1
        if isinstance(compiled, nn.Module):
            self._modules[compiled] = part
            return compiled
        number = self._numbers[part]

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._called.setdefault(part, set()).add(number)
            return compiled(*args, **kwargs)

        return call

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if part := self._modules.get(module):
            self._called.setdefault(part, set()).add(id(module))


def _name_of(model: Any) -> str:
    if inspect.ismethod(model) and isinstance(model.__self__, nn.Module):
        model = model.__self__
    return (
        type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__qualname__", repr(model))
    )


def _asking_line() -> str:
    """Return the line of the program that compiles, and the library that does it for it."""
    frame, library = sys._getframe(1), ""
    while frame is not None and is_of_library(frame.f_code.co_filename):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "lowmem_ft", "functools"):
            library = library or package
        frame = frame.f_back
    if frame is None:
        return library or "a library"
    line = shown_line(frame.f_code.co_filename, frame.f_lineno)
    return f"{line}, by {library}" if library else line
