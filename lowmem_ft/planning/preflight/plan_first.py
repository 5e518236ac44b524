"""Plan of a recipe for this machine before training, or the plan with which a resumed run began."""

from __future__ import annotations

import dataclasses
import logging
import shlex
import time

import torch

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.catalog.this_machine import this_machines_gpu
from lowmem_ft.foundation.errors import DoesNotFitError, UserError, raise_problems
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.memory.uncertainty import TIGHT_SHARE
from lowmem_ft.foundation.system.child_process import ChildFailedError
from lowmem_ft.foundation.system.host_limits import tightest_host_limit
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.planning.estimator.device_target import CPU, limits
from lowmem_ft.planning.estimator.estimating_processes import EstimatingProcess
from lowmem_ft.planning.planner import MemoryPlan, PlanProgress, plan, plan_checkpointing
from lowmem_ft.planning.planner.automatic_checkpointing import chosen_in_words
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.recipe.rules.engine_rules import problems_with_processes
from lowmem_ft.recipe.rules.output_folder import run_folder_of
from lowmem_ft.recipe.space.search_space import planned_keys, with_settings
from lowmem_ft.training.folder.replaced_run import RECIPE_FILE, run_files
from lowmem_ft.training.folder.run_folder import RunFolder
from lowmem_ft.training.processes.launch import read_launch

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 5

_WAYS_OUT = {
    "memory settings": (
        "`lowmem-ft plan` with the same settings shows why; plan.mode=none trains the recipe unchanged."
    ),
    "checkpointed layers": "`lowmem-ft estimate` with the same settings shows why; checkpointing.mode=full "
    "checkpoints every layer.",
}


def with_plan(recipe: Recipe, folder: RunFolder | None = None) -> tuple[Recipe, MemoryEstimate | None]:
    """Return the recipe with the memory settings, or only the checkpointed layers, that were chosen for its budget.

    A resumed run keeps the plan that it began with. The search runs in a separate process, because a virtual GPU would
    change torch for the run.

    Args:
        recipe: a recipe with ``plan.mode=auto`` or ``checkpointing.mode=auto``.
        folder: the folder that the run writes to, and the checkpoint that it resumes from; None: as the recipe says.

    Returns:
        The recipe, and its estimate on this machine, which the plan ended with; None for a resumed run.

    Raises:
        UserError: if there are several processes, the run's folder is in the way, or the recipe cannot be planned.
        DoesNotFitError: if nothing fits; the message says how much memory the nearest combination lacks.
    """
    raise_problems(
        problems_with_processes(recipe, read_launch(use_cpu=recipe.training.use_cpu).num_processes)
    )
    saved = _saved_recipe(recipe, folder)
    if saved is not None:
        logger.info("Resuming with the memory settings that the run was planned with.")
        return _as_planned(recipe, saved), None
    if folder is None:
        RunFolder.open(recipe)  # reports what is in the way before the search
    found = planned_for_this_machine(recipe)
    # The memory that was free on this machine while the plan was made is not a limit of the recipe.
    own_limits = limits(None if found.estimate.is_of_cpu else this_machines_gpu(), recipe.budget)
    estimate = dataclasses.replace(found.estimate, budget=own_limits)
    return dataclasses.replace(found.recipe, budget=recipe.budget), estimate


def planned_for_this_machine(recipe: Recipe) -> MemoryPlan:
    """Plan a recipe for this machine's GPU, or its CPU, and log the choice in one line.

    Args:
        recipe: a recipe with ``plan.mode=auto`` or ``checkpointing.mode=auto``.

    Returns:
        The plan; the host budget of its recipe is the memory that was free when the plan was made.

    Raises:
        UserError: if the recipe cannot be planned.
        DoesNotFitError: if nothing fits; the message says how much memory the nearest combination lacks.
    """
    gpu = this_machines_gpu() if torch.cuda.is_available() and not recipe.training.use_cpu else CPU
    found = _searched(recipe, gpu)
    if not found.fits:
        raise DoesNotFitError(_nothing_fits(recipe, found))
    if recipe.plan.mode == "auto":
        logger.info(
            "Planned in %.0f s, %s combinations considered: %s. %s",
            found.seconds,
            f"{found.searched:,}",
            shlex.join(found.settings) or "the unchanged recipe",
            _needs(found),
        )
    else:
        logger.info("%s", chosen_in_words(found))
    return found


def _searched(recipe: Recipe, gpu: str | Gpu) -> MemoryPlan:
    budget = recipe.budget
    if budget.host is None:
        budget = dataclasses.replace(budget, host=f"{tightest_host_limit(None).available_bytes}B")
    last_line = time.monotonic()

    def tell(progress: PlanProgress) -> None:
        nonlocal last_line
        if time.monotonic() - last_line > SECONDS_BETWEEN_LINES:
            last_line = time.monotonic()
            found = "nothing fits yet" if progress.best is None else "one fits"
            logger.info("Planning: %d combinations estimated, %s.", progress.estimated, found)

    search, what = plan, "memory settings"
    if recipe.plan.mode == "none":
        search, what = plan_checkpointing, "checkpointed layers"
    logger.info("Choosing the %s for this machine.", what)
    try:
        with EstimatingProcess() as process:
            return process.call(search, recipe, budget, gpu, on_progress=tell)
    except ChildFailedError as error:
        raise UserError(f"Choosing the {what} failed: {error}. {_WAYS_OUT[what]}") from error


def _saved_recipe(recipe: Recipe, folder: RunFolder | None) -> Recipe | None:
    """Return the recipe of the run that is resumed; None if no run is."""
    if folder is not None:
        run, checkpoint = folder.path, folder.resume_from
    else:
        run, checkpoint = run_folder_of(recipe), RunFolder.checkpoint_of(recipe)
    if checkpoint is not None:
        run = checkpoint.parent
    elif recipe.training.resume_from_checkpoint is None or not run_files(run):
        return None  # no run, not even one that was stopped before its first checkpoint
    file = run / RECIPE_FILE
    return load_recipe(str(file)) if file.is_file() else None


def _as_planned(recipe: Recipe, saved: Recipe) -> Recipe:
    """Return the recipe with the saved values of all keys that a plan may choose, except those in ``plan.keep``."""
    planned = recipe
    if recipe.checkpointing.mode == "auto":
        planned = dataclasses.replace(planned, checkpointing=saved.checkpointing)
    if recipe.plan.mode == "auto":
        chosen = planned_keys(recipe)
        planned = with_settings(planned, {key.path: key.value_in(saved) for key in chosen})
    return dataclasses.replace(planned, plan=dataclasses.replace(recipe.plan, mode="none"))


def _needs(found: MemoryPlan) -> str:
    estimate = found.estimate
    time_of_step = "" if estimate.step is None else f", {estimate.step.seconds:.3g} s a step"
    return (
        f"It needs {format_bytes(estimate.process_peak_bytes)} of the device and "
        f"{format_bytes(estimate.host_peak_bytes)} of the host{time_of_step}."
    )


def _nothing_fits(recipe: Recipe, found: MemoryPlan) -> str:
    lacks = [
        f"{format_bytes(size)} of {part}"
        for part, size in (
            ("device memory", found.missing_device_bytes),
            ("host memory", found.missing_host_bytes),
        )
        if size
    ]
    smallest = (
        "" if found.smallest_gpu is None else f" The smallest GPU that would do is {found.smallest_gpu}."
    )
    settings, more = "settings make", "explains more"
    if recipe.plan.mode == "none":
        settings, more = "choice of checkpointed layers makes", "chooses all other memory settings too"
    return (
        f"No {settings} it fit with {TIGHT_SHARE:.0%} to spare: the nearest, "
        f"{shlex.join(found.settings) or 'the unchanged recipe'}, lacks {' and '.join(lacks) or 'memory'}.{smallest} "
        f"`lowmem-ft plan` with the same settings {more}; plan.allow=[...] names what a plan may give up."
    )
