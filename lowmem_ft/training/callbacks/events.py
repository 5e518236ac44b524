"""The values that callbacks of a run receive, and the one that they return to end it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lowmem_ft.training.folder.checkpoint_folders import Progress

__all__ = ["EvaluationEvent", "SaveEvent", "StepEvent", "Stop"]


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """An optimizer step that was taken: the argument of ``on_step``.

    Args:
        step: its number, from 1.
        num_steps: the step at which the run ends.
        epoch: passes over the training data so far.
        loss: training loss in nats per label token, over all micro-batches and processes.
        learning_rate: the step's learning rate.
        grad_norm: global gradient norm before clipping.
        tokens: tokens seen since the run's first step, padding excluded, in all processes.
        tokens_per_second: tokens of this step per second, in all processes.
        memory_now_bytes: device memory allocated by this process; on a CPU the memory that the process holds.
        memory_peak_bytes: the most so far, likewise.
        skipped_steps: steps so far that were skipped, because their loss or gradient was not finite.
    """

    step: int
    num_steps: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    memory_now_bytes: int
    memory_peak_bytes: int
    skipped_steps: int

    @classmethod
    def of(cls, record: Mapping[str, Any], num_steps: int) -> StepEvent:
        """Return the event of a step's line in ``metrics.jsonl``."""
        values = {**record, "num_steps": num_steps}
        return cls(**{field.name: values[field.name] for field in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class EvaluationEvent:
    """An evaluation on the held-out data: the argument of ``on_evaluate``.

    Args:
        step: optimizer steps taken before it; 0 for ``training.eval_on_start``.
        loss: held-out loss in nats per label token.
        num_label_tokens: number of tokens in the mean.
        best_step: the step of the best evaluation so far, this one included; None: the recipe has neither
            ``training.load_best_model_at_end`` nor ``training.early_stopping_patience``, or none was finite.
        evaluations_without_gain: evaluations since the last one that was better, this one included; 0 if it was.
    """

    step: int
    loss: float
    num_label_tokens: int
    best_step: int | None
    evaluations_without_gain: int

    @classmethod
    def of(cls, progress: Progress, loss: float, num_label_tokens: int) -> EvaluationEvent:
        """Return the event of an evaluation that was just compared with the best."""
        return cls(
            step=progress.step,
            loss=loss,
            num_label_tokens=num_label_tokens,
            best_step=progress.best and progress.best.step,
            evaluations_without_gain=progress.evaluations_without_gain,
        )

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinite if that overflows a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True, kw_only=True)
class SaveEvent:
    """A complete checkpoint: the argument of ``on_save``.

    Args:
        step: the step whose weights it holds.
        checkpoint: its folder; later saves may delete it (``training.save_total_limit``).
    """

    step: int
    checkpoint: Path


@dataclass(frozen=True)
class Stop:
    """The wish to end a run, which a callback returns: it then ends as a finished one, evaluated and saved.

    Args:
        reason: a sentence for the log and the summary of the run.
    """

    reason: str = "A callback asked to stop."
