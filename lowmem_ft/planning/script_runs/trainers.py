"""Trainers of transformers and TRL in an estimate: no trackers, a few steps, an evaluation after them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.utils.operations import recursively_apply
from torch import Tensor
from torch.utils.data import Subset

from lowmem_ft.foundation.upstream.import_hooks import wrap_when_imported
from lowmem_ft.foundation.upstream.patches import replace
from lowmem_ft.planning.script_runs.after_training import AfterTraining
from lowmem_ft.planning.script_runs.longest_batch import LongestBatchSearch
from lowmem_ft.planning.script_runs.short_data import DataCut
from lowmem_ft.planning.script_runs.temporary_files import FilesKeptAway
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine

NUM_MICRO_BATCHES = 2
"""The most micro-batches traced per step: from the second on, each adds to the gradients of those before, and nothing
else changes.
"""

EVALUATION_BATCHES = 2


class ShortTraining:
    """Lets the trainers of a script train for a few steps.

    Args:
        machine: the machine that the script runs on.
        cut: the data cut, which receives the number of rows of a step.
        files: where output goes.
        num_steps: steps to take.
        on_trainer: called with each trainer that is about to train.
        after: called when a trainer has trained.
    """

    def __init__(
        self,
        machine: TracingMachine,
        cut: DataCut,
        files: FilesKeptAway,
        num_steps: int,
        on_trainer: Callable[[Any], None],
        after: AfterTraining,
    ) -> None:
        self._machine = machine
        self._cut = cut
        self._files = files
        self._num_steps = num_steps
        self._on_trainer = on_trainer
        self._after = after
        self.micro_batches: int | None = None
        """Micro-batches per step, where only some of them are traced."""
        self._others: list[Any] = []
        self.longest = LongestBatchSearch()
        self.has_trainer = False
        """True once a trainer of transformers or TRL has trained."""

    def tokens_of_step(self, traced_tokens: int) -> int:
        """Return the tokens of all micro-batches of a step, from the tokens of those that are traced."""
        return traced_tokens * (self.micro_batches or NUM_MICRO_BATCHES) // NUM_MICRO_BATCHES

    def apply(self, undo: contextlib.ExitStack) -> None:
        """Shorten all training from now on, until the stack is undone."""
        for module, owner, name, around in (
            ("transformers.training_args", "TrainingArguments", "__post_init__", self._check_quietly),
            ("transformers.trainer", "Trainer", "train", self._train_shortly),
            ("transformers.trainer", "Trainer", "get_batch_samples", self._hold_others),
            ("transformers.trainer", "Trainer", "get_train_dataloader", self._with_longest_batch),
            ("transformers.trainer", "Trainer", "evaluate", partial(self._measure_shortly, "eval_dataset")),
            ("transformers.trainer", "Trainer", "predict", partial(self._measure_shortly, "test_dataset")),
        ):
            wrap_when_imported(undo, module, owner, name, around)

    def _check_quietly(self, check: Callable[[Any], None], arguments: Any) -> None:
        arguments.report_to, arguments.disable_tqdm, arguments.push_to_hub = "none", True, False
        check(arguments)
        rows = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
        self._cut.rows_per_step = max(self._cut.rows_per_step, rows)

    def _train_shortly(
        self,
        train: Callable[..., Any],
        trainer: Any,
        resume_from_checkpoint: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._after.end_before_it("trains again")
        self.has_trainer = True
        if resume_from_checkpoint:
            self._machine.say("resume_from_checkpoint: not read; the steps are those of a new run")
        with self._files.as_ever():
            self._on_trainer(trainer)
        self._leave_out_micro_batches(trainer)
        if trainer.eval_dataset is not None and gathers_logits(trainer):
            self._machine.say(
                "evaluation: compute_metrics gathers the logits of all held-out rows on the device, and those of "
                f"{EVALUATION_BATCHES} batches are in the estimate; eval_accumulation_steps or "
                "preprocess_logits_for_metrics would keep them small"
            )
        trainer.add_callback(_stop_after(self._num_steps, evaluates=trainer.eval_dataset is not None))
        with contextlib.ExitStack() as undo:
            # Of this trainer, as its class may generate around the step of its base.
            replace(undo, trainer, "training_step", partial(self._train_micro_batch, trainer.training_step))
            result = train(trainer, None, *args, **kwargs)
        if trainer.state.global_step >= self._num_steps:
            self._after.begin()
        return result

    def _leave_out_micro_batches(self, trainer: Any) -> None:
        """Trace few micro-batches per step, except where completions for all of them are generated at once."""
        in_a_step = trainer.args.gradient_accumulation_steps
        if in_a_step <= NUM_MICRO_BATCHES or hasattr(trainer, "_buffered_inputs"):
            return
        trainer.args.gradient_accumulation_steps = NUM_MICRO_BATCHES
        self.micro_batches = in_a_step
        self._machine.say(f"micro-batches: {NUM_MICRO_BATCHES} of the {in_a_step} of a step are traced")

    def _with_longest_batch(self, load: Callable[..., Any], trainer: Any) -> Any:
        """Let the longest batch be the last of the second step: the optimizer's state is there, and gradients are."""
        loader, in_a_step = load(trainer), trainer.args.gradient_accumulation_steps
        if self.has_trainer:
            steps = trainer.args.max_steps
            taken = steps * (self.micro_batches or in_a_step) if steps > 0 else None
            traced, last_of_second = self._num_steps * in_a_step, min(2, self._num_steps) * in_a_step - 1
            self.longest.bring_forward(loader, last_of_second, traced, taken)
        return loader

    def _hold_others(self, fetch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Hold as much memory as the batches of the micro-batches that are left out: a step fetches all before it."""
        batches, num_items = fetch(*args, **kwargs)
        missing = (self.micro_batches or 0) - len(batches)
        self._others = [
            recursively_apply(self._input_like, batches[number % len(batches)])
            for number in range(missing if batches else 0)
        ]
        return batches, num_items

    def _input_like(self, tensor: Tensor) -> Tensor:
        other = torch.empty_like(tensor)
        self._machine.mark(other, "input")
        return other

    def _few_rows(self, rows: Any, batch_size: int) -> Any:
        if isinstance(rows, dict):
            return {name: self._few_rows(part, batch_size) for name, part in rows.items()}
        most = EVALUATION_BATCHES * batch_size
        if rows is None or isinstance(rows, str):  # a name among its own
            return rows
        if not hasattr(rows, "__len__"):
            return rows.take(most) if hasattr(rows, "take") else rows
        if len(rows) <= most:
            return rows
        return rows.select(range(most)) if hasattr(rows, "select") else Subset(rows, range(most))

    def _measure_shortly(
        self, name: str, measure: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        given = {**dict(zip((name, "ignore_keys", "metric_key_prefix"), args, strict=False)), **kwargs}
        few = partial(self._few_rows, batch_size=trainer.args.per_device_eval_batch_size)
        trainer.eval_dataset = few(trainer.eval_dataset)
        return measure(trainer, few(given.pop(name, None)), **given)

    def _train_micro_batch(self, training_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._machine.micro_batch(), self._machine.attribution.scoring():
            return training_step(*args, **kwargs)


def gathers_logits(trainer: Any) -> bool:
    """Return whether an evaluation of a Trainer keeps the logits of all its rows on the device until its end."""
    return (
        trainer.compute_metrics is not None
        and trainer.preprocess_logits_for_metrics is None
        and not trainer.args.prediction_loss_only
        and not getattr(trainer.args, "predict_with_generate", False)  # it gathers tokens
        and trainer.args.eval_accumulation_steps is None
    )


def _stop_after(num_steps: int, *, evaluates: bool) -> Any:
    from transformers import TrainerCallback

    class StopAfter(TrainerCallback):
        """Ends training as ``max_steps`` would, but with the schedule of the whole run."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            is_last = state.global_step == min(num_steps, state.max_steps)
            control.should_evaluate = evaluates and is_last
            control.should_save = control.should_save or (is_last and args.load_best_model_at_end)
            state.best_metric = None  # losses have no values, and none may end training early
            control.should_training_stop = control.should_training_stop or state.global_step >= num_steps
            return control

    return StopAfter()
