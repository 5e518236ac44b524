"""The best model of a run: which evaluation was the best, and the checkpoint that holds its weights.

``metric_for_best_model``, ``greater_is_better`` and ``early_stopping_threshold`` mean what ``TrainingArguments`` and
``EarlyStoppingCallback`` of transformers mean by them. An evaluation that is not finite is never the best, and neither
is the one before the first step. Other than there, each better evaluation saves a checkpoint: the best of all that were
evaluated is kept, not the best of those that happened to be saved.
"""

from __future__ import annotations

import math
from pathlib import Path

from lowmem_ft.recipe import TrainingConfig
from lowmem_ft.training.evaluation.held_out_loss import EvaluationResult
from lowmem_ft.training.folder.checkpoint_folders import BestEvaluation, Progress, checkpoint_of_step
from lowmem_ft.training.folder.run_folder import RunFolder


class BestModel:
    """Comparison of a run's evaluations; its state is in the run's :class:`Progress`.

    Args:
        config: says what is compared, and whether the best model is the finished one.
        folder: the run's folder.
        progress: progress of the run; this class changes ``best`` and ``evaluations_without_gain``.
    """

    def __init__(self, config: TrainingConfig, folder: RunFolder, progress: Progress) -> None:
        self._progress = progress
        self._is_finished_model = config.load_best_model_at_end
        self._compares = config.load_best_model_at_end or config.early_stopping_patience is not None
        self._metric = f"eval_{(config.metric_for_best_model or 'loss').removeprefix('eval_')}"
        self._sign = 1 if config.greater_is_better else -1
        self._threshold = config.early_stopping_threshold
        resumed = folder.resume_from
        self._folders = [folder.path, *([] if resumed is None else [resumed.parent])]

    def compare(self, result: EvaluationResult) -> None:
        """Compare an evaluation of the current step with the best so far."""
        progress, record = self._progress, result.record()
        if not self._compares or progress.step == 0:
            return
        gain = self._gain(record[self._metric])
        progress.evaluations_without_gain = (
            0 if gain > self._threshold else progress.evaluations_without_gain + 1
        )
        if gain > 0:
            progress.best = BestEvaluation(step=progress.step, metrics=record)

    def _gain(self, value: float) -> float:
        """Return by how much a value is better than the best; 0 if it is not finite."""
        if not math.isfinite(value):
            return 0.0
        best = self._progress.best
        return math.inf if best is None else self._sign * (value - best.metrics[self._metric])

    @property
    def step(self) -> int | None:
        """The step of the best evaluation so far, if its weights become the finished model; None: the last ones do."""
        best = self._progress.best
        return best.step if best is not None and self._is_finished_model else None

    @property
    def is_current(self) -> bool:
        """True if the weights of the current step are the best, so that a checkpoint has to keep them."""
        return self.step == self._progress.step

    @property
    def is_earlier(self) -> bool:
        """True if a checkpoint holds the best weights, and the finished model is made from that."""
        return self.step is not None and not self.is_current

    def checkpoint(self) -> Path:
        """Return that checkpoint.

        Raises:
            CheckpointError: if it is gone.
        """
        assert self.step is not None, "is_earlier was asked"
        return checkpoint_of_step(self.step, self._folders)

    def evaluation(self, last: EvaluationResult | None) -> EvaluationResult | None:
        """Return the evaluation of the weights that become the finished model, given that of the last step."""
        best = self._progress.best
        if best is None or not self.is_earlier:
            return last
        return EvaluationResult(best.metrics["eval_loss"], best.metrics["eval_label_tokens"])
