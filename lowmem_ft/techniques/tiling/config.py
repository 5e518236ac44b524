"""The keys of what is computed tile by tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.knob import Effect, knob
from lowmem_ft.foundation.memory.least_memory import gone_unless


@dataclass(frozen=True, kw_only=True)
class TilingConfig:
    """Parts of a layer that are computed tile by tile."""

    mlp: int = knob(
        1,
        "Pieces of the sequence that pass through each MLP one after the other; 1: the whole sequence at once.",
        frees="the MLP's inner activations except for those of one piece, while a layer is recomputed",
        costs="each piece is computed again in backward; smaller matrix products",
        effects=Effect(cost="time", engines=("ddp", "fsdp2", "zero2")),
        off=1,
        search_values=(1, 4),
        remaining_bytes={"activations": gone_unless(1)},
    )
    head: int = knob(
        1,
        "Pieces of the vocabulary in which the head is computed; 1: the whole vocabulary at once.",
        frees="memory for the logits in addition to the head's weight and gradient, except for one piece",
        costs="the head's logits are computed twice",
        effects=Effect(cost="time"),
        off=1,
        search_values=(1, 8),
        remaining_bytes={"logits": gone_unless(1)},
    )

    def problems(self) -> Iterator[str]:
        """Yield the rules that these values break by themselves."""
        for name in ("mlp", "head"):
            if getattr(self, name) < 1:
                yield f"tiling.{name} must be at least 1, got {getattr(self, name)}. Set it to 1 for no tiles."

    def refuse_vocabulary(self, rows: int) -> None:
        """Reject more vocabulary tiles than the vocabulary has rows.

        Raises:
            UserError: if there are more.
        """
        if self.head > rows:
            raise UserError(
                f"tiling.head must be at most the vocabulary's {rows} rows, got {self.head}. Set tiling.head=8."
            )
