"""Estimates and plans for a Python program that may train next: in another process, if this one sees a GPU.

A virtual GPU changes torch for its whole process (``planning/estimator/estimating_processes.py``). Commands that only
estimate call the functions behind these; the package's own names, and commands that use the GPU afterwards, call these.
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
from lowmem_ft.foundation.system.child_process import ChildFailedError
from lowmem_ft.foundation.virtual_device import has_virtual_device
from lowmem_ft.planning.estimator.device_target import CPU
from lowmem_ft.planning.estimator.estimating_processes import EstimatingProcess
from lowmem_ft.recipe.named_recipe import as_recipe

if TYPE_CHECKING:
    from lowmem_ft.planning.estimator.estimate import estimate_memory  # noqa: F401
    from lowmem_ft.planning.estimator.forward_estimate import estimate_evaluation  # noqa: F401
    from lowmem_ft.planning.planner.automatic_checkpointing import plan_checkpointing  # noqa: F401
    from lowmem_ft.planning.planner.planning import plan  # noqa: F401
    from lowmem_ft.planning.rehearsal.rehearse import rehearse  # noqa: F401

_MODULES = {
    "estimate_evaluation": "lowmem_ft.planning.estimator.forward_estimate",
    "estimate_memory": "lowmem_ft.planning.estimator.estimate",
    "plan": "lowmem_ft.planning.planner.planning",
    "plan_checkpointing": "lowmem_ft.planning.planner.automatic_checkpointing",
    "rehearse": "lowmem_ft.planning.rehearsal.rehearse",
}
"""Module of each function; imported on first use."""


@functools.cache
def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _away_from_cuda(getattr(importlib.import_module(_MODULES[name]), name))


def _away_from_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does the same, in another process if this one might train on a GPU.

    Args:
        function: takes a ``recipe`` and a ``gpu``; an argument that is a function is called with its progress.
    """

    @functools.wraps(function)
    def called(*arguments: Any, **keywords: Any) -> Any:
        if not torch.cuda.is_available() or has_virtual_device():
            return function(*arguments, **keywords)
        named = inspect.signature(function).bind(*arguments, **keywords).arguments
        callbacks = {name: named.pop(name) for name in list(named) if callable(named[name])}
        if named.get("gpu") is None:  # the other process sees none
            named["gpu"] = CPU if as_recipe(named["recipe"]).training.use_cpu else this_machines_gpu()
        try:
            with EstimatingProcess() as process:
                return process.call(functools.partial(function, **named), **callbacks)
        except ChildFailedError as error:
            raise UserError(f"{function.__name__} failed in its own process: {error}.") from error

    return called
