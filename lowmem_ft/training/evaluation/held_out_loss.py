"""Loss and perplexity on held-out data, without keeping logits."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lowmem_ft.data.batches.batch import Batch, LabelledRows
from lowmem_ft.data.batches.splitting import half_of, pieces
from lowmem_ft.techniques.loss.router_loss import router_loss_off
from lowmem_ft.training.out_of_memory.error import NotRetried, is_out_of_memory
from lowmem_ft.training.out_of_memory.retry import abandon, give_memory_back, why_rows_couple
from lowmem_ft.training.processes.ranks import Ranks
from lowmem_ft.training.step.session import ForwardSession
from lowmem_ft.training.step.step import evaluation_loss

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationResult:
    """Mean loss over all label tokens of the held-out data.

    Args:
        loss: negative log-likelihood per label token, in nats.
        num_label_tokens: number of tokens in the mean.
        by_source: loss of each of several sources, by its name.
    """

    loss: float
    num_label_tokens: int
    by_source: Mapping[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinite if that overflows a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def record(self) -> dict[str, Any]:
        """Return the values under their names in ``metrics.jsonl`` and trackers."""
        return {
            "eval_loss": self.loss,
            "eval_perplexity": self.perplexity,
            "eval_label_tokens": self.num_label_tokens,
            **{f"eval_loss_{name}": loss for name, loss in self.by_source.items()},
        }

    def __str__(self) -> str:
        each = "".join(f", {name} {loss:.4f}" for name, loss in self.by_source.items())
        return f"held-out loss {self.loss:.4f}, perplexity {self.perplexity:.2f}{each}"


def together(results: Mapping[str, EvaluationResult]) -> EvaluationResult:
    """Return the results of several sources as one, its loss the mean over all their label tokens."""
    count = sum(result.num_label_tokens for result in results.values())
    loss_sum = sum(result.loss * result.num_label_tokens for result in results.values())
    by_source = {name: result.loss for name, result in results.items()}
    return EvaluationResult(loss_sum / max(count, 1), count, by_source)


class EvaluationInPieces:
    """Evaluation that continues when memory runs out, with that batch and later ones split in two.

    Nothing is trained, and the sums are the same except for their order. The micro-batch limit of training is not
    changed.

    Args:
        may_cut: whether batches may be split at all.
    """

    def __init__(self, *, may_cut: bool = True) -> None:
        self._may_cut = may_cut
        self._max_tokens: int | None = None

    def loss(self, session: ForwardSession, batches: Iterable[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss and the label token count of all batches.

        Raises:
            NotRetried: if memory ran out and the batch cannot be split.
        """
        loss_sum, num_label_tokens = evaluation_loss(session, [])
        for batch in batches:
            waiting = pieces(batch, self._max_tokens)
            while waiting:
                sums = self._loss_of(session, waiting[0])
                if sums is None:
                    waiting = [piece for rows in waiting for piece in pieces(rows, self._max_tokens)]
                    continue
                loss_sum += sums[0]
                num_label_tokens += sums[1]
                del waiting[0]
        return loss_sum, num_label_tokens

    def _loss_of(
        self, session: ForwardSession, rows: LabelledRows
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the sums of some rows; None if memory ran out and the rows have to be split further."""
        try:
            return evaluation_loss(session, [rows])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._max_tokens = self._half_of(session, rows, error)
        abandon(session)
        give_memory_back(session.runtime.machine.device)
        logger.warning(
            "Device memory ran out in an evaluation, which continues with at most %s tokens at a time; training is "
            "not affected. training.per_device_eval_batch_size sets the size that it begins with.",
            f"{self._max_tokens:,}",
        )
        return None

    def _half_of(self, session: ForwardSession, rows: LabelledRows, error: Exception) -> int:
        with router_loss_off(session.unwrapped_model):
            half, why = half_of(rows), why_rows_couple(session.unwrapped_model)
        if not self._may_cut or session.runtime.ranks.num_processes > 1:
            why = "budget.retry=false" if not self._may_cut else "there are several processes"
        if half is None or why is not None:
            reason = why or "it is a single row or document"
            raise NotRetried(f"It ran out in an evaluation, whose batch cannot be cut: {reason}.") from error
        return half


def evaluate(
    session: ForwardSession,
    ranks: Ranks,
    batches: Iterable[Batch],
    *,
    in_pieces: EvaluationInPieces | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> EvaluationResult | None:
    """Evaluate over this process's share of the held-out batches; every process calls this.

    Args:
        session: the model to evaluate; its training mode is restored.
        ranks: add up the processes' sums.
        batches: the same number in all processes.
        in_pieces: holds the batch limit that earlier evaluations of this run have found; None: there is no limit yet.
        interrupted: called before each batch.

    Returns:
        The result, or None if the evaluation was interrupted.
    """

    def until_interrupted() -> Iterable[Batch]:
        for batch in batches:
            if ranks.max(interrupted()):
                return
            yield batch

    session.techniques.flush()
    session.model.eval()
    try:
        loss_sum, num_label_tokens = (in_pieces or EvaluationInPieces()).loss(session, until_interrupted())
    finally:
        session.model.train()
    if ranks.max(interrupted()):
        return None
    count = int(ranks.sum(num_label_tokens))
    return EvaluationResult(float(ranks.sum(loss_sum)) / max(count, 1), count)
