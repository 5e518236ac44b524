"""Memory of a trainer's run: an estimate before it, peaks in its logs, and both compared after it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.comparison import Row
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.system.device_memory import read_device_memory
from lowmem_ft.planning.preflight.background_estimate import BackgroundEstimate
from lowmem_ft.planning.script_recipes.row_lengths import longest_row
from lowmem_ft.planning.script_recipes.script_recipe import Script, is_sft, recipe_of, refuse_other_losses
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.named_recipe import RecipeLike, as_budget, as_recipe
from lowmem_ft.techniques.technique import Techniques
from lowmem_ft.training.run.preflight import check_estimate
from lowmem_ft.training.run.run_memory import RunMemory

logger = logging.getLogger(__name__)


class MemoryCallback(TrainerCallback):
    """Memory of a run of ``transformers.Trainer`` or one of TRL's, with ``hf.attach`` or without.

    ::

        trainer = Trainer(..., callbacks=[MemoryCallback(budget="24GiB")])

    As training begins, it estimates what a step needs, in a process next to this one, compares that with the budget or
    the device, and logs one line. Each log of the trainer gets ``memory_peak_bytes``: the peak of tensors on CUDA, or
    of the process on a CPU. At the end it logs estimated and measured peaks by phase. Its lines go to the loggers below
    ``lowmem_ft``.

    Trackers of ``report_to`` run before other callbacks: ``trainer.callback_handler.callbacks.insert(0,
    MemoryCallback())`` puts this one before them.

    Args:
        recipe: the recipe that runs, such as the one passed to ``hf.attach``; None: :func:`recipe_from` reads it from
            the trainer. Runs of TRL's trainers other than SFT's are measured and not estimated.
        budget: the memory that may be used: a budget, or the device's part such as ``24GiB``; None: the recipe's, else
            all there is.
        estimate: an estimate made before; None: the callback makes one.

    Attributes:
        estimate: the estimate of the run; None before it, and where it could not be made: a warning says why.

    Raises:
        DoesNotFitError: as training begins, if more is needed than there is; ``Budget(enforce=False)`` warns instead.
    """

    def __init__(
        self,
        recipe: RecipeLike | None = None,
        *,
        budget: Budget | str | None = None,
        estimate: MemoryEstimate | None = None,
    ) -> None:
        self.estimate = estimate
        self._recipe = None if recipe is None else as_recipe(recipe)
        self._budget = as_budget(budget)
        self._memory: RunMemory | None = None
        self._phase = ""
        self._running = contextlib.ExitStack()
        self._step_began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the estimate, and check it against the budget."""
        self._memory = RunMemory(args.device)
        if not state.is_world_process_zero:
            return
        recipe = self._recipe_of(args, kwargs)
        if recipe is None:
            return
        if recipe.budget.preflight and self.estimate is None:
            self.estimate = _estimated_in_background(recipe, args, _longest(kwargs))
        if self.estimate is not None:
            self._memory.estimate = self.estimate
            check_estimate(recipe, self.estimate, num_processes=args.world_size)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the step's phase."""
        self._begin("step")
        self._step_began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the memory that remains after the step."""
        seconds = time.perf_counter() - self._step_began
        self._begin("save" if control.should_save and not control.should_evaluate else "")
        if self._memory is not None:
            self._memory.after_step(kwargs["model"], kwargs["optimizer"], Techniques(), seconds)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the evaluation's phase with its first batch."""
        self._begin("evaluation")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the evaluation's phase; a save may follow."""
        self._begin("save" if control.should_save else "")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the save's phase."""
        self._begin("")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the peak so far to the shown logs and to the trainer's history."""
        if logs is None or self._memory is None:
            return
        peak = {"memory_peak_bytes": read_device_memory(args.device).peak_bytes}
        logs.update(peak)
        if state.log_history:
            state.log_history[-1].update(peak)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log measured peaks, next to the estimated ones if there is an estimate."""
        self._begin("")
        for row in self.rows():
            if row.measured is not None:
                logger.info("Memory, %s", row)

    def rows(self) -> list[Row]:
        """Return estimated and measured bytes, quantity by quantity; empty before the first run."""
        return [] if self._memory is None else self._memory.rows()

    def _begin(self, phase: str) -> None:
        """End the running phase unless it is the same, and begin the named one; an empty name begins no phase."""
        if self._memory is None or phase == self._phase:
            return
        self._running.close()
        self._phase = phase
        if phase:
            self._running.enter_context(self._memory.during(phase))

    def _recipe_of(self, args: TrainingArguments, kwargs: dict[str, Any]) -> Recipe | None:
        recipe = self._recipe
        try:
            refuse_other_losses(args)
            if recipe is None:
                recipe = recipe_of(_script_of(args, kwargs))
        except UserError as error:
            logger.warning("The run's memory could not be estimated: %s Training continues.", error)
            return None
        return recipe if self._budget is None else dataclasses.replace(recipe, budget=self._budget)


def _estimated_in_background(
    recipe: Recipe, args: TrainingArguments, longest: int | None
) -> MemoryEstimate | None:
    with contextlib.closing(BackgroundEstimate()) as background:
        background.begin(recipe, args.device)
        return background.finish(longest)


def _script_of(args: TrainingArguments, kwargs: dict[str, Any]) -> Script:
    """Collect the parts of a trainer that a callback receives."""
    optimizer = kwargs["optimizer"]
    return Script(
        args=args,
        model=kwargs["model"],
        optimizer=getattr(optimizer, "optimizer", optimizer),  # out of Accelerate's wrapper
        longest_row=_longest(kwargs),
        collator=_collator(kwargs),
        evaluates=args.eval_strategy != "no",
        has_fused_head=is_sft(type(args)),
    )


def _collator(kwargs: dict[str, Any]) -> Any:
    """Return the script's own collator, from inside the one that removes columns."""
    collator = getattr(kwargs.get("train_dataloader"), "collate_fn", None)
    return getattr(collator, "data_collator", collator)


def _longest(kwargs: dict[str, Any]) -> int | None:
    dataset = getattr(kwargs.get("train_dataloader"), "dataset", None)
    return None if dataset is None else longest_row([dataset], _collator(kwargs))
