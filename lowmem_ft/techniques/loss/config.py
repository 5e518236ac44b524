"""The keys of the loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowmem_ft.foundation.knob import NO_EFFECT, knob
from lowmem_ft.foundation.memory.least_memory import gone_unless


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The way the loss is computed from the last hidden states."""

    chunk_tokens: int | None = knob(
        1024,
        "Label tokens whose logits exist at the same time; null: the model's own loss, over all logits at once.",
        frees="12 bytes * tokens * vocabulary at the peak become 2 (float32: 4; 16 bits without Triton: 6) bytes * "
        "chunk_tokens * vocabulary",
        costs="with a half-precision head, 2 bytes * label tokens * vocabulary, at most 4 * hidden * vocabulary",
        effects=NO_EFFECT,
        search_values=(None, 1024),
        planned=(None, 8192, 2048, 1024, 512),
        remaining_bytes={"logits": gone_unless(None)},
    )
    label_smoothing_factor: float = knob(
        0.0,
        "Share of each label that is spread over the whole vocabulary in training, not in evaluation.",
    )

    def problems(self) -> Iterator[str]:
        """Yield the rules that these values break by themselves."""
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            yield (
                f"loss.chunk_tokens must be at least 1, got {self.chunk_tokens}. "
                "Set it to 1024, or to null for the model's own loss."
            )
        if not 0 <= self.label_smoothing_factor < 1:
            yield (
                f"loss.label_smoothing_factor is from 0 to below 1, got {self.label_smoothing_factor}. Try 0.1, or 0 "
                "to switch smoothing off."
            )
        if self.label_smoothing_factor and self.chunk_tokens is None:
            yield (
                f"loss.label_smoothing_factor={self.label_smoothing_factor} needs loss.chunk_tokens, got null: the "
                "model's own loss does not smooth. Set loss.chunk_tokens=1024 or loss.label_smoothing_factor=0."
            )
