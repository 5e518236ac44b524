"""Training behind an estimate: what a run needs is known, and held against what there is, before a weight is read.

This is what the command line and ``lowmem_ft.train`` call. :mod:`lowmem_ft.training` imports nothing from above itself;
it is handed who estimates.
"""

from __future__ import annotations

import logging

import torch

from lowmem_ft.catalog.gpu import Gpu
from lowmem_ft.catalog.this_machine import this_machines_gpu
from lowmem_ft.errors import UserError
from lowmem_ft.estimator.child_process import ChildFailedError, EstimatingProcess, estimate_without_timeline
from lowmem_ft.estimator.target import CPU
from lowmem_ft.memory.estimate import MemoryEstimate
from lowmem_ft.recipe import Recipe
from lowmem_ft.training.loop import TrainResult
from lowmem_ft.training.loop import train as train_without_preflight
from lowmem_ft.training.preflight import with_rows_of
from lowmem_ft.training.run_folder import RunFolder
from lowmem_ft.training.runtime import RunRuntime

logger = logging.getLogger(__name__)


def train(recipe: Recipe, folder: RunFolder | None = None, runtime: RunRuntime | None = None) -> TrainResult:
    """Estimate what a recipe needs; then train it, from a fresh start or from a checkpoint, and save the model.

    Args:
        recipe: see :func:`lowmem_ft.load_recipe`; ``budget.preflight=false`` leaves the estimate out.
        folder: what :meth:`RunFolder.open` made of the recipe; None: opened here.
        runtime: the device and the processes; None: those of ``accelerate launch``, or one of this machine.

    Returns:
        Where everything lies and how it ended.

    Raises:
        UserError: if the recipe, its model, its data or the folder cannot be used, or nothing finite comes out.
        DoesNotFitError: if memory is estimated not to suffice, before weights are read, or does not.
        Interrupted: after SIGINT (Ctrl-C) or SIGTERM, once a checkpoint (or the finished model) is saved.
        KeyboardInterrupt: after SIGINT before the first step, or a second one while a step is being ended.
    """
    preflight = EstimateBeside()
    try:
        return train_without_preflight(recipe, folder, runtime, preflight)
    finally:
        preflight.close()


class EstimateBeside:
    """Estimates a run in another process, whose imports take as long as the data does here.

    A run that cannot be estimated is trained all the same, and a warning says why: whatever is wrong with a recipe,
    training itself says.
    """

    def __init__(self) -> None:
        self._process: EstimatingProcess | None = None
        self._recipe: Recipe | None = None
        self._gpu: str | Gpu = CPU

    def begin(self, recipe: Recipe, device: torch.device) -> None:
        """Start the other process."""
        self._recipe = recipe
        if device.type == "cuda":
            self._gpu = this_machines_gpu(device)
        self._process = EstimatingProcess()

    def finish(self, longest_row: int | None) -> MemoryEstimate | None:
        """Have it estimate, and wait; see :class:`lowmem_ft.training.preflight.Preflight`."""
        assert self._process is not None, "begin() goes before"
        assert self._recipe is not None
        self._process.ask(estimate_without_timeline, with_rows_of(self._recipe, longest_row), self._gpu)
        logger.info("Estimating what the run needs.")
        try:
            return self._process.answer()
        except (ChildFailedError, UserError) as error:
            logger.warning("What the run needs could not be estimated: %s Training goes on.", error)
            return None

    def close(self) -> None:
        """End the other process."""
        if self._process is not None:
            self._process.close()
            self._process = None
