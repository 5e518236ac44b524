"""Training that is preceded by an estimate, and by a plan if the recipe asks for one."""

from __future__ import annotations

from collections.abc import Sequence

from lowmem_ft.foundation.allocator_setting import use_growing_segments
from lowmem_ft.planning.preflight.background_estimate import BackgroundEstimate
from lowmem_ft.planning.preflight.plan_first import with_plan
from lowmem_ft.recipe.named_recipe import RecipeLike, as_recipe
from lowmem_ft.training.callbacks.callbacks import check_callbacks
from lowmem_ft.training.export.train_result import TrainResult
from lowmem_ft.training.folder.run_folder import RunFolder
from lowmem_ft.training.processes.launch import Launch, as_launched
from lowmem_ft.training.run.loop import train as train_without_preflight
from lowmem_ft.training.runtimes.runtime import Runtime


def train(
    recipe: RecipeLike,
    folder: RunFolder | None = None,
    runtime: Runtime | None = None,
    *,
    callbacks: Sequence[object] = (),
) -> TrainResult:
    """Estimate the memory of a run, then train from scratch or from a checkpoint, and save the model.

    If ``plan.mode`` or ``checkpointing.mode`` is auto, the settings that it leaves open are chosen first.

    Args:
        recipe: see :func:`lowmem_ft.load_recipe`, or its name or path; ``budget.preflight=false`` skips the estimate.
        folder: the result of :meth:`RunFolder.open` for the recipe; None: opened here.
        runtime: the device and the processes; None: those of ``accelerate launch``, or one process on this machine.
        callbacks: objects with any of the methods ``on_step(StepEvent)``, ``on_evaluate(EvaluationEvent)`` and
            ``on_save(SaveEvent)``, called in the main process alone. Each returns None, or :class:`Stop`: the run then
            ends after this step as if it were the last, evaluated and saved. An exception ends it at the same place,
            once a checkpoint is saved.

    Returns:
        The folders of the run and how it ended.

    Raises:
        UserError: if the recipe, its model, its data or the folder cannot be used, or the result is not finite.
        DoesNotFitError: if no plan fits, if memory is estimated not to suffice before weights are read, or if it runs
            out.
        Interrupted: after SIGINT (Ctrl-C), SIGTERM, SIGHUP or SIGUSR1, once a checkpoint (or the finished model) is
            saved.
        KeyboardInterrupt: after SIGINT before the first step, or after a second one while the current step finishes.
    """
    recipe = as_recipe(recipe)
    check_callbacks(callbacks)
    use_growing_segments()
    estimate = None
    if recipe.undecided_keys:
        recipe, estimate = with_plan(recipe, folder)
    planned_for_one = None if estimate is None else (as_launched(recipe, Launch()), estimate)
    preflight = BackgroundEstimate(known=planned_for_one)
    try:
        return train_without_preflight(recipe, folder, runtime, preflight, callbacks=callbacks)
    finally:
        preflight.close()
