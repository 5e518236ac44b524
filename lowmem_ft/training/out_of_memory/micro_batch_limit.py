"""What a run does in smaller pieces since its memory ran out; imports no torch, as checkpoints are read by it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Smaller pieces than the recipe says; nothing of it by default.

    Tokens, not rows: memory goes by tokens, and a step of short rows that fits as it is stays whole.

    Args:
        max_tokens: of the rows that pass through the model (in vertical order: through a layer) together, padding
            included; None: the recipe's rows.
        max_loss_tokens: tokens whose logits exist together; None: ``loss.chunk_tokens``.
    """

    max_tokens: int | None = None
    max_loss_tokens: int | None = None

    def metrics(self) -> dict[str, int]:
        """What of it is in force, as ``metrics.jsonl`` has it."""
        values = {"max_micro_batch_tokens": self.max_tokens, "max_loss_tokens": self.max_loss_tokens}
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        """For people, as what micro-batches and logits are cut to."""
        parts = []
        if self.max_tokens is not None:
            parts.append(f"at most {self.max_tokens:,} tokens of micro-batches")
        if self.max_loss_tokens is not None:
            parts.append(f"the logits of at most {self.max_loss_tokens:,}")
        return " and ".join(parts)
