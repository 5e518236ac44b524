"""Loss and perplexity on held-out data, without keeping logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lowmem_ft.data import Batch
from lowmem_ft.training.runtime import RunRuntime
from lowmem_ft.training.session import Session
from lowmem_ft.training.step import evaluation_loss


@dataclass(frozen=True)
class EvaluationResult:
    """Mean over all label tokens of the held-out data.

    Args:
        loss: negative log-likelihood per label token, in nats.
        num_label_tokens: how many tokens that is the mean of.
    """

    loss: float
    num_label_tokens: int

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinite where that does not fit a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def evaluate(
    session: Session,
    runtime: RunRuntime,
    batches: Iterable[Batch],
    *,
    interrupted: Callable[[], bool] = lambda: False,
) -> EvaluationResult | None:
    """Evaluate over this process's share of the held-out batches; every process calls this.

    Args:
        session: the model to evaluate; its training mode is put back.
        runtime: adds up what the processes found.
        batches: equally many in all processes.
        interrupted: asked before each batch.

    Returns:
        The result, or None if it was interrupted.
    """

    def until_interrupted() -> Iterable[Batch]:
        for batch in batches:
            if runtime.any_process(interrupted()):
                return
            yield batch

    session.techniques.flush()
    session.model.eval()
    try:
        loss_sum, num_label_tokens = evaluation_loss(session, until_interrupted())
    finally:
        session.model.train()
    if runtime.any_process(interrupted()):
        return None
    count = int(runtime.sum_over_processes(num_label_tokens))
    return EvaluationResult(float(runtime.sum_over_processes(loss_sum)) / max(count, 1), count)
