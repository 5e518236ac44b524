"""When a GPU reaches each event of a program's last traced step, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class StepClock:
    """Seconds at which a GPU reaches the events of a step. Events are counted from the beginning of the timeline.

    Args:
        between_steps: for each point between two steps, the number of events by then.
        positions: numbers of events, increasing, shape [N]: first that of the step's begin.
        seconds: the seconds from the step's begin until the GPU has done what was issued by then, shape [N].
        step_seconds: seconds of the traced step.
        micro_batches: for each traced micro-batch, the number of events at its begin and at its end.
        untraced: further micro-batches, which the last traced one represents.
        untraced_seconds: seconds of one of them.
        repeated: for each stretch of events that represents several like it, the number at its begin and at its end.
    """

    between_steps: tuple[int, ...]
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
