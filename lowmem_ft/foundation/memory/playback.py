"""Replayed timelines as values: the bytes that a GPU's allocator holds after each event, and when the event happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class StepClock:
    """Seconds at which a GPU reaches the events of a step. Events are counted from the beginning of the timeline.

    Args:
        positions: numbers of events, increasing, shape [N]: first that of the step's begin.
        seconds: the seconds from the step's begin until the GPU has done what was issued by then, shape [N].
        step_seconds: seconds of the traced step.
        micro_batches: for each traced micro-batch, the number of events at its begin and at its end.
        untraced: further micro-batches, which the last traced one represents.
        untraced_seconds: seconds of one of them.
        repeated: for each stretch of events that represents several like it, the number at its begin and at its end.
    """

    positions: NDArray[np.int64]
    seconds: NDArray[np.float64]
    step_seconds: float
    micro_batches: tuple[tuple[int, int], ...] = ()
    untraced: int = 0
    untraced_seconds: float = 0.0
    repeated: tuple[tuple[int, int], ...] = ()

    @property
    def events(self) -> tuple[int, int]:
        """The number of events at the step's begin and at its end."""
        return int(self.positions[0]), int(self.positions[-1])


@dataclass(frozen=True, kw_only=True)
class Playback:
    """The bytes that a GPU's caching allocator holds over a timeline, and its clock of the last step.

    Args:
        block_bytes: size of the block that serves each allocation, by its index; 0 if it is stored elsewhere.
        reserved_bytes: bytes that the allocator holds after each event, without a limit; in the step that repeats and
            after it, what it holds in the long run.
        step: the clock of the step; None: there was no step.
    """

    block_bytes: Sequence[int]
    reserved_bytes: Sequence[int]
    step: StepClock | None
