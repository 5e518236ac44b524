"""Limits on micro-batches and loss chunks since memory ran out; checkpoints are read with them, but without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MicroBatchLimit:
    """Limits below the recipe's micro-batch and loss chunk; no limit by default.

    They count tokens, not rows: memory depends on tokens, and a step of short rows that fits is not split.

    Args:
        max_tokens: tokens of the rows that pass through the model (in vertical order: through a layer) together,
            padding included; None: the recipe's rows.
        max_loss_tokens: tokens whose logits exist at the same time; None: ``loss.chunk_tokens``.
    """

    max_tokens: int | None = None
    max_loss_tokens: int | None = None

    def metrics(self) -> dict[str, int]:
        """Return the limits in force, by their names in ``metrics.jsonl``."""
        values = {"max_micro_batch_tokens": self.max_tokens, "max_loss_tokens": self.max_loss_tokens}
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        """Return the limits in words."""
        parts = []
        if self.max_tokens is not None:
            parts.append(f"micro-batches of at most {self.max_tokens:,} tokens")
        if self.max_loss_tokens is not None:
            parts.append(f"the logits of at most {self.max_loss_tokens:,}")
        return " and ".join(parts)
