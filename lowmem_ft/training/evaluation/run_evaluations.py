"""The evaluations of one run: held-out loss and answers to prompts, compared with the best and written down."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lowmem_ft.data.batches.epoch_rows import Examples
from lowmem_ft.data.batches.stream import eval_batches
from lowmem_ft.data.prepared_data import PreparedData
from lowmem_ft.recipe import Recipe
from lowmem_ft.training.callbacks.run_metrics import RunMetrics
from lowmem_ft.training.evaluation.best_model import BestModel
from lowmem_ft.training.evaluation.held_out_loss import (
    EvaluationInPieces,
    EvaluationResult,
    evaluate,
    together,
)
from lowmem_ft.training.evaluation.run_generations import RunGenerations
from lowmem_ft.training.folder.checkpoint_folders import Progress
from lowmem_ft.training.folder.generations_file import Generation
from lowmem_ft.training.runtimes.runtime import Runtime
from lowmem_ft.training.step.session import Session

logger = logging.getLogger(__name__)


class Evaluated(NamedTuple):
    """One evaluation, before it is compared and written.

    Attributes:
        result: the loss on held-out data; None: prompts alone were answered.
        answers: the answers to the prompts, only in the main process.
    """

    result: EvaluationResult | None
    answers: Sequence[Generation]


class RunEvaluations:
    """The evaluations of one run, in every process of it.

    Args:
        recipe: its ``training.eval_*`` keys.
        data: its held-out part.
        session: the model with its optimizer.
        runtime: the device and the processes.
        generations: the prompts that the model answers.
        progress: progress of the run; this class changes ``evaluated_step``, and :class:`BestModel` its own fields.
        best: compares the evaluations.
        metrics: where results are written.
        interrupted: whether this process has received a signal, which cuts an evaluation short.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: PreparedData,
        session: Session,
        runtime: Runtime,
        generations: RunGenerations,
        progress: Progress,
        best: BestModel,
        metrics: RunMetrics,
        interrupted: Callable[[], bool],
    ) -> None:
        self._config, self._data, self._session, self._runtime = recipe.training, data, session, runtime
        self._generations, self._progress, self._best = generations, progress, best
        self._metrics, self._interrupted = metrics, interrupted
        self._in_pieces = EvaluationInPieces(may_cut=recipe.budget.retry)

    def __bool__(self) -> bool:
        """Return whether the run has held-out data or prompts."""
        return self._data.evaluation is not None or bool(self._generations)

    def evaluate(self, *, loss: bool = True) -> Evaluated | None:
        """Evaluate on held-out data and answer prompts, whichever of both there is.

        Args:
            loss: whether to evaluate on held-out data.

        Returns:
            What was found, for :meth:`keep`; None: a signal cut it short.
        """
        result = None
        if loss and self._data.evaluation is not None and (result := self._held_out_result()) is None:
            return None
        answers = self._generations.answers(self._session, self._progress.step, self._interrupted)
        return None if answers is None else Evaluated(result, answers)

    def keep(self, evaluated: Evaluated) -> bool:
        """Compare an evaluation of the current step with the best, and write it down.

        Returns:
            Whether it is the first of this step: a run that was stopped right after its last one makes it again.
        """
        progress, result = self._progress, evaluated.result
        is_new, progress.evaluated_step = progress.evaluated_step != progress.step, progress.step
        if result is not None:
            if is_new:
                self._best.compare(result)
            self._metrics.write({"step": progress.step, **result.record()}, to_trackers=True)
            best_so_far = ", the best so far" if self._best.is_current else ""
            logger.info("Step %d: %s%s.", progress.step, result, best_so_far)
        self._generations.write(evaluated.answers)
        return is_new

    def _held_out_result(self) -> EvaluationResult | None:
        """Evaluate on the held-out data, source by source; None if a signal cut it short."""
        if not (by_source := self._data.evaluation_by_source):
            assert self._data.evaluation is not None, "callers check that there is held-out data"
            return self._result_on(self._data.evaluation)
        results = {name: self._result_on(examples) for name, examples in by_source.items()}
        finished = {name: one for name, one in results.items() if one is not None}
        return together(finished) if len(finished) == len(results) else None

    def _result_on(self, examples: Examples) -> EvaluationResult | None:
        """Evaluate on some held-out examples; None if a signal cut it short."""
        config, runtime = self._config, self._runtime
        batches = eval_batches(
            examples,
            batch_size=config.per_device_eval_batch_size or config.per_device_train_batch_size,
            plan=runtime.ranks.plan,
            collate=self._data.collate,
        )
        return evaluate(
            self._session,
            runtime.ranks,
            runtime.values.to_evaluate(batches),
            in_pieces=self._in_pieces,
            interrupted=self._interrupted,
        )
