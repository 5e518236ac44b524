"""Named ranges in a profile: the modules of a model by their hooks, and other parts of a step by their methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.profiler import record_function

from lowmem_ft.foundation.handle import Handle

STEP = "lowmem_ft step"
MODULE, PART = "lowmem_ft module: ", "lowmem_ft part: "
"""Beginnings of the names of ranges; the rest is the qualified name of a module, or the part of the step."""

T = TypeVar("T")


class ModuleRanges(Handle):
    """Ranges around the forward of every module of a model, hooks of its own included, until ``remove()``.

    Args:
        model: the model, with its final modules; they get hooks, and nothing else of them changes.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._running: list[tuple[nn.Module, record_function]] = []
        for name, module in model.named_modules():
            begins = module.register_forward_pre_hook(self._begins(name), prepend=True)
            ends = module.register_forward_hook(self._ends, always_call=True)
            self.undo_first(begins.remove, ends.remove)

    def _begins(self, name: str) -> Callable[[nn.Module, Any], None]:
        def begin(module: nn.Module, args: Any) -> None:
            self._running.append((module, entered(MODULE + name)))

        return begin

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the module's range, and those within it that an error or checkpointing's early stop has left open."""
        if not any(one is module for one, _ in self._running):
            return  # its forward began before the hooks
        while self._running:
            one, running = self._running.pop()
            running.__exit__(None, None, None)
            if one is module:
                return


def entered(name: str) -> record_function:
    """Return a range that has begun."""
    return record_function(name).__enter__()


def in_range(part: str) -> Callable[..., Any]:
    """Return a function that calls another one with its arguments in the range of a part of the step."""

    def call(method: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        with record_function(PART + part):
            return method(*args, **kwargs)

    return call
