"""Estimates and plans for a Python program that may train next: in another process, if this one sees a GPU.

A virtual GPU changes torch for its whole process (``planning/estimator/child_process.py``). Commands that only estimate
call the functions behind these; the package's own names, and commands that use the GPU afterwards, call these.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lowmem_ft.foundation.catalog.this_machine import this_machines_gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.virtual_device import has_virtual_device
from lowmem_ft.planning.estimator.child_process import ChildFailedError, EstimatingProcess
from lowmem_ft.planning.estimator.device_target import CPU
from lowmem_ft.recipe.named_recipe import as_recipe

if TYPE_CHECKING:
    from lowmem_ft.planning.estimator.estimate import estimate_memory  # noqa: F401
    from lowmem_ft.planning.estimator.forward_estimate import estimate_evaluation  # noqa: F401
    from lowmem_ft.planning.planner.automatic_checkpointing import plan_checkpointing  # noqa: F401
    from lowmem_ft.planning.planner.planning import plan  # noqa: F401
    from lowmem_ft.planning.rehearsal.rehearse import rehearse  # noqa: F401

_FUNCTIONS = {
    "estimate_evaluation": ("lowmem_ft.planning.estimator.forward_estimate", None),
    "estimate_memory": ("lowmem_ft.planning.estimator.estimate", None),
    "plan": ("lowmem_ft.planning.planner.planning", "on_progress"),
    "plan_checkpointing": ("lowmem_ft.planning.planner.automatic_checkpointing", "on_progress"),
    "rehearse": ("lowmem_ft.planning.rehearsal.rehearse", "on_step"),
}
"""Module of each function, and the argument that it calls with its progress; imported on first use."""


@functools.cache
def __getattr__(name: str) -> Any:
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, progress = _FUNCTIONS[name]
    return _away_from_cuda(getattr(importlib.import_module(module), name), progress)


def _away_from_cuda(function: Callable[..., Any], progress: str | None) -> Callable[..., Any]:
    """Return a function that does the same, in another process if this one might train on a GPU.

    Args:
        function: takes a ``recipe`` and a ``gpu``.
        progress: name of its argument that is called with its progress; None: it tells none.
    """

    @functools.wraps(function)
    def called(*arguments: Any, **keywords: Any) -> Any:
        if not torch.cuda.is_available() or has_virtual_device():
            return function(*arguments, **keywords)
        named = inspect.signature(function).bind(*arguments, **keywords).arguments
        tell = named.pop(progress, None) if progress else None
        if named.get("gpu") is None:  # the other process sees none
            named["gpu"] = CPU if as_recipe(named["recipe"]).training.use_cpu else this_machines_gpu()
        try:
            with EstimatingProcess() as process:
                process.ask(_call, function, named, progress, tells_progress=True)
                return process.answer(lambda values: None if tell is None else tell(*values))
        except ChildFailedError as error:
            raise UserError(f"{function.__name__} failed in its own process: {error}.") from error

    return called


def _call(
    function: Callable[..., Any],
    named: dict[str, Any],
    progress: str | None,
    on_progress: Callable[[tuple[Any, ...]], None],
) -> Any:
    """Call a function in the other process."""
    further = {} if progress is None else {progress: lambda *values: on_progress(values)}
    return function(**named, **further)
