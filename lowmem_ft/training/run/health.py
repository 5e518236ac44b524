"""Health of a run's weights: whether they are still finite, which step ruined them, and the last good checkpoint.

A step whose loss or gradient is not finite changes no weight; it is counted, and its examples are named. However, an
applied step can ruin all weights, for example by a learning rate that is far too high: its own loss came from the
weights before it. Weights are known to be good once a later step has computed a finite loss with them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.tensors.finiteness import names_of_not_finite, some_of
from lowmem_ft.foundation.tensors.local_shards import local_part
from lowmem_ft.recipe import Recipe
from lowmem_ft.training.evaluation.held_out_loss import EvaluationResult
from lowmem_ft.training.folder.checkpoint_folders import Progress, find_checkpoint, set_aside_checkpoints
from lowmem_ft.training.folder.run_folder import RunFolder
from lowmem_ft.training.processes.ranks import Ranks
from lowmem_ft.training.step.session import Session
from lowmem_ft.training.step.step import StepResult

logger = logging.getLogger(__name__)


class SuspectWeightsError(UserError):
    """Error for weights that produce nothing finite any more: checkpoints since their last update may be ruined."""


class RunHealth:
    """Record of a run's skipped steps, and of the last step that changed its weights.

    Args:
        recipe: the run's recipe.
        folder: the run's folder, for its checkpoints and the one that it resumes from, which may be elsewhere.
        progress: the run's progress; this class counts skipped steps in it, and changes nothing else.
        ranks: gather the examples of the other processes.
    """

    def __init__(self, recipe: Recipe, folder: RunFolder, progress: Progress, ranks: Ranks) -> None:
        self._output_dir, self._resume_from = folder.path, folder.resume_from
        self._model_folder = folder.model_folder
        self._progress, self._ranks = progress, ranks
        self._dtype = recipe.model.dtype
        self._max_skipped_steps = recipe.training.max_skipped_steps
        self._updated_step = progress.step - progress.skipped_in_a_row
        self._learning_rate: float | None = None
        self._took_the_newest = (
            recipe.training.resume_from_checkpoint == "auto" and folder.resume_from is not None
        )

    def after_step(
        self, session: Session, result: StepResult, sample_ids: Sequence[int], learning_rate: float
    ) -> None:
        """Count a step if it was skipped, and log its examples.

        Args:
            session: the session that took the step.
            result: the step's result.
            sample_ids: this process's examples in the step.
            learning_rate: the step's learning rate.

        Raises:
            UserError: if the weights are ruined, or too many steps in a row have been skipped.
        """
        progress = self._progress
        if result.applied:
            progress.skipped_in_a_row = 0
            self._updated_step, self._learning_rate = progress.step, learning_rate
            return
        if session.techniques.updates_at_once:
            raise self._half_a_step(result, sample_ids)
        progress.skipped_steps += 1
        if result.overflow:
            logger.info(
                "Step %d skipped: the fp16 loss scale was too high and has been halved.", progress.step
            )
            return
        progress.skipped_in_a_row += 1
        logger.warning(
            "Step %d skipped: loss %.4g, gradient norm %.4g. Examples of this step: %s.",
            progress.step,
            result.loss,
            result.grad_norm,
            sorted(self._ranks.gather(list(sample_ids))),
        )
        self.refuse_ruined_weights(session)
        if progress.skipped_in_a_row >= self._max_skipped_steps:
            raise self._too_many_skipped()

    def refuse_ruined_weights(self, session: Session) -> None:
        """Stop a run whose weights no later step can repair.

        Raises:
            SuspectWeightsError: if a weight is not finite; the message names it, and the step that made it so.
        """
        names = weights_not_finite(session, self._ranks)
        if names:
            raise SuspectWeightsError(f"{self._ruined(names)} {self.way_back()}")

    def problems_at_the_end(self, names: Sequence[str], evaluation: EvaluationResult | None) -> list[str]:
        """Return the reasons not to use a finished model; empty if there is no reason, or only a warning was logged.

        Args:
            names: names of its weights that are not finite.
            evaluation: result on the held-out data, if there is any.
        """
        skipped, problems = self._progress.skipped_in_a_row, []
        if names:
            problems.append(self._ruined(names))
        elif evaluation is not None and not math.isfinite(evaluation.loss):
            problems.append(f"The held-out loss is {evaluation.loss:.4g}.")
        if skipped and not names:
            which = "step was" if skipped == 1 else f"{skipped} steps were"
            since = (
                f" since step {self._updated_step}{self._at_learning_rate()}" if self._updated_step else ""
            )
            problems.append(
                f"The last {which} not finite and changed no weight{since}. Lower training.learning_rate, or check "
                "the examples named above."
            )
        if 0 < self._progress.step == self._progress.skipped_steps and not problems:
            logger.warning(
                "Each of the %d steps was skipped to lower the fp16 loss scale: the model is unchanged. Train for "
                "more steps.",
                self._progress.step,
            )
        return problems

    def refuse_unhealthy_end(self, problems: Sequence[str], evaluation: EvaluationResult | None) -> None:
        """Raise an error for a finished and saved model that should not be used.

        Args:
            problems: the result of :meth:`problems_at_the_end`.
            evaluation: result on the held-out data, if there is any.

        Raises:
            SuspectWeightsError: if there are problems, and no held-out loss shows that the weights are good.
            UserError: if only steps after the last update failed.
        """
        if not problems:
            return
        is_good = evaluation is not None and math.isfinite(evaluation.loss)
        raise (UserError if is_good else SuspectWeightsError)(
            f"The run has ended, but do not use {self._model_folder}. {' '.join(problems)} {self.way_back()}"
        )

    def set_aside_checkpoints(self) -> None:
        """Rename checkpoints with suspect weights.

        If the run has updated no weight since it resumed, that is the checkpoint from which it resumed: the process
        that saved it may have been killed before it could notice. A checkpoint that the user has named stays, as other
        settings may be the cause.
        """
        if self._ranks.is_main and (self._learning_rate is not None or self._took_the_newest):
            set_aside_checkpoints(self._output_dir, since=self._updated_step)

    def way_back(self) -> str:
        """Return a sentence on the newest checkpoint whose weights are known to be good."""
        whole = find_checkpoint(self._output_dir, before=self._updated_step)
        if whole is None and self._resume_from is not None and self._resume_from.parent != self._output_dir:
            whole = self._resume_from
        if whole is None:
            return "There is no earlier checkpoint: start again."
        return f"The last checkpoint with finite weights is {whole}."

    def _too_many_skipped(self) -> SuspectWeightsError:
        """Return the error of a run whose last steps were all not finite, although its weights are finite."""
        suspect = (
            "They did not change the weights, and no earlier step did."
            if self._updated_step == 0
            else f"They did not change the weights, but step {self._updated_step}, the last that "
            f"did{self._at_learning_rate()}, may have ruined them all: nothing finite has come out of them since."
        )
        return SuspectWeightsError(
            f"The loss or gradient was not finite for {self._max_skipped_steps} steps in a row "
            f"(training.max_skipped_steps), the last at step {self._progress.step}. {suspect} {self.way_back()} Lower "
            "training.learning_rate, check the examples named above, or compute in float32."
        )

    def _half_a_step(self, result: StepResult, sample_ids: Sequence[int]) -> UserError:
        """Return the error for weights that were updated before their step turned out not to be finite."""
        checkpoint = find_checkpoint(self._output_dir)
        way_back = (
            "there is no checkpoint yet, so start again"
            if checkpoint is None
            else f"resume from {checkpoint}"
        )
        return UserError(
            f"Step {self._progress.step} was not finite (loss {result.loss:.4g}, gradient norm "
            f"{result.grad_norm:.4g}; examples {sorted(sample_ids)}), and without clipping optimizer.in_backward had "
            f"already updated part of the weights: {way_back}. Set training.max_grad_norm, with which such a step is "
            "skipped as a whole, or optimizer.in_backward=false."
        )

    def _ruined(self, names: Sequence[str]) -> str:
        if self._learning_rate is None and self._resume_from is None:
            return (
                f"Weights are not finite, although those of the checkpoint are: {some_of(list(names))}. The values "
                f"are beyond the largest of model.dtype={self._dtype}: set model.dtype=float32, or bfloat16 on a GPU "
                "that computes with it."
            )
        return (
            f"Weights are not finite since step {self._updated_step}{self._at_learning_rate()}: "
            f"{some_of(list(names))}. Lower training.learning_rate."
        )

    def _at_learning_rate(self) -> str:
        return "" if self._learning_rate is None else f" (learning rate {self._learning_rate:.3g})"


def weights_not_finite(session: Session, ranks: Ranks) -> list[str]:
    """Return the names of weights with NaN or infinity, frozen ones included; every process calls this.

    Each process checks the part that it holds, and all get the same result.
    """
    with session.techniques.at_rest():
        parameters = list(session.unwrapped_model.named_parameters())
        here = names_of_not_finite((name, local_part(parameter)) for name, parameter in parameters)
    anywhere = set(ranks.gather(here))
    return [name for name, _ in parameters if name in anywhere]
