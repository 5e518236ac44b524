"""The trace of a recipe: of all of its layers, or of a few that stand for all."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lowmem_ft.virtual_gpu.calls.trace import Trace
from lowmem_ft.virtual_gpu.replay.depth.layer_extrapolation import Repetition


@dataclass(frozen=True, kw_only=True)
class TracedRecipe:
    """A trace, and the batch it was made with.

    Args:
        trace: the trace of load, steps and evaluation.
        tokens_per_micro_batch: tokens without padding.
        batch: its shape, for people.
        vocabulary_size: tokens of the model.
        copied_weight_bytes: bytes of memory that counts as weights but holds copies of weights stored elsewhere.
    """

    trace: Trace
    tokens_per_micro_batch: int
    batch: str
    vocabulary_size: int = 0
    copied_weight_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ShortTrace:
    """The trace of a recipe's few layers, and how the trace of all layers follows from it.

    Args:
        traced: the trace with a few layers, or with all.
        repetition: how deeper models follow; None: all layers were traced.
        more: periods that each stretch of the model has beyond the traced ones.
    """

    traced: TracedRecipe
    repetition: Repetition | None = None
    more: tuple[int, ...] = ()

    def whole(self) -> TracedRecipe:
        """Return the trace of all layers."""
        if self.repetition is None:
            return self.traced
        trace = self.repetition.extend(self.traced.trace, self.more)
        return dataclasses.replace(self.traced, trace=trace)
