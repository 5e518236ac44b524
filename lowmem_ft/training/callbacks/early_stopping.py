"""Early stopping, as a callback."""

from __future__ import annotations

from dataclasses import dataclass

from lowmem_ft.training.callbacks.events import EvaluationEvent, Stop


@dataclass(frozen=True)
class EarlyStopping:
    """End of a run whose evaluations no longer get better, as ``training/evaluation/best_model.py`` compares them.

    Args:
        patience: ``training.early_stopping_patience``.
        threshold: ``training.early_stopping_threshold``, by which results that count as better have improved.
    """

    patience: int
    threshold: float = 0.0

    def on_evaluate(self, event: EvaluationEvent) -> Stop | None:
        """Ask to stop after ``patience`` evaluations in a row without a gain."""
        return self.verdict(event.evaluations_without_gain)

    def verdict(self, evaluations_without_gain: int) -> Stop | None:
        """Return the same for a count, which a resumed run has from its checkpoint."""
        if evaluations_without_gain < self.patience:
            return None
        by = f" by more than training.early_stopping_threshold={self.threshold:g}" if self.threshold else ""
        return Stop(
            f"The held-out result has not improved{by} for {evaluations_without_gain} evaluations in a row."
        )
