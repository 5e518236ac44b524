"""What a trace of a recipe is: of all of its layers, or of a few that stand for all."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lowmem_ft.virtual_gpu.recording.trace import Trace
from lowmem_ft.virtual_gpu.replay.depth.layer_extrapolation import Repetition


@dataclass(frozen=True, kw_only=True)
class TracedRecipe:
    """A trace, and the batch it was made with.

    Args:
        trace: of load, steps and evaluation.
        tokens_per_micro_batch: without padding.
        batch: its shape, for people.
        vocabulary_size: tokens of the model.
        copied_weight_bytes: memory that counts as weights and holds copies of some that are elsewhere.
    """

    trace: Trace
    tokens_per_micro_batch: int
    batch: str
    vocabulary_size: int = 0
    copied_weight_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ShortTrace:
    """What was traced of a recipe, and how all of it follows.

    Args:
        traced: with a few layers, or with all.
        repetition: how deeper models follow; None: all layers were traced.
        more: periods that each stretch of the model has beyond what was traced.
    """

    traced: TracedRecipe
    repetition: Repetition | None = None
    more: tuple[int, ...] = ()

    def whole(self) -> TracedRecipe:
        """The trace of all layers."""
        if self.repetition is None:
            return self.traced
        trace = self.repetition.extend(self.traced.trace, self.more)
        return dataclasses.replace(self.traced, trace=trace)
