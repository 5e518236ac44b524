"""Estimate of a run, made in another process while the run prepares its data."""

from __future__ import annotations

import logging

import torch

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.catalog.this_machine import this_machines_gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.system.child_process import ChildFailedError
from lowmem_ft.planning.estimator.device_target import CPU
from lowmem_ft.planning.estimator.estimate import estimate_without_timeline
from lowmem_ft.planning.estimator.estimating_processes import EstimatingProcess
from lowmem_ft.recipe import Recipe
from lowmem_ft.training.run.preflight import with_rows_of

logger = logging.getLogger(__name__)


class BackgroundEstimate:
    """Estimator of a run in another process, whose imports take as long as preparing the data takes here.

    If the run cannot be estimated, a warning gives the reason and the run trains all the same: if something is wrong
    with the recipe, training itself reports it.

    Args:
        known: a recipe with its estimate on this machine, which is not made again; None: no estimate exists yet.
    """

    def __init__(self, known: tuple[Recipe, MemoryEstimate] | None = None) -> None:
        self._known = known
        self._process: EstimatingProcess | None = None
        self._recipe: Recipe | None = None
        self._gpu: str | Gpu = CPU

    def begin(self, recipe: Recipe, device: torch.device) -> None:
        """Start the other process, unless rows have the recipe's full length and that estimate is known already."""
        self._recipe = recipe
        rows_are_full = recipe.data.packing or recipe.data.streaming
        if rows_are_full and self._known_of(recipe) is not None:
            return
        if device.type == "cuda":
            self._gpu = this_machines_gpu(device)
        try:
            self._process = EstimatingProcess()
        except ChildFailedError as error:
            _warn(error)

    def finish(self, longest_row: int | None) -> MemoryEstimate | None:
        """Request the estimate and wait for it; see :class:`lowmem_ft.training.run.preflight.Preflight`."""
        assert self._recipe is not None, "begin() comes first"
        recipe = with_rows_of(self._recipe, longest_row)
        if (known := self._known_of(recipe)) is not None:
            return known
        if self._process is None:
            return None
        logger.info("Estimating the run's memory.")
        try:
            return self._process.call(estimate_without_timeline, recipe, self._gpu)
        except (ChildFailedError, UserError) as error:
            _warn(error)
            return None

    def _known_of(self, recipe: Recipe) -> MemoryEstimate | None:
        planned, estimate = self._known or (None, None)
        return estimate if planned == recipe else None

    def close(self) -> None:
        """End the other process."""
        if self._process is not None:
            self._process.close()
            self._process = None


def _warn(error: Exception) -> None:
    logger.warning("The run's memory could not be estimated: %s. Training continues.", str(error).rstrip("."))
