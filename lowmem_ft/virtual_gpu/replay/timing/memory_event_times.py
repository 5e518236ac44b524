"""GPU times of a step's memory events, from the times of the work that was issued between them."""

from __future__ import annotations

import numpy as np

from lowmem_ft.foundation.memory.playback import StepClock
from lowmem_ft.virtual_gpu.calls.trace import Trace
from lowmem_ft.virtual_gpu.replay.timing.clock import Times


def step_clock(
    trace: Trace, times: Times, bounds: tuple[int, int], *, untraced: int = 0, untraced_seconds: float = 0.0
) -> StepClock:
    """Return when the stream that computes reaches the events of a step.

    Args:
        trace: the trace.
        times: when each entry of its log runs.
        bounds: the step's first entry, and the one after its last.
        untraced: micro-batches of the step that were not traced.
        untraced_seconds: seconds of one of them.
    """
    first, last = bounds
    began = float(times.ends[:first].max(initial=0.0))
    step_seconds = max(0.0, float(times.ends[:last].max(initial=0.0)) - began)
    reached = np.where(times.is_on_main[first:last], times.ends[first:last] - began, 0.0)
    reached = np.maximum.accumulate(np.clip(reached, 0.0, step_seconds))
    positions, firsts = np.unique(trace.positions[first:last], return_index=True)
    lasts = np.append(firsts[1:], last - first) - 1
    seconds = reached[lasts]
    seconds[0], seconds[-1] = 0.0, step_seconds
    return StepClock(
        positions=positions,
        seconds=seconds,
        step_seconds=step_seconds,
        micro_batches=_events(trace, trace.micro_batches, bounds),
        untraced=untraced,
        untraced_seconds=untraced_seconds,
        repeated=_events(trace, trace.repeated, bounds),
    )


def _events(
    trace: Trace, stretches: list[tuple[int, int]], bounds: tuple[int, int]
) -> tuple[tuple[int, int], ...]:
    """Return stretches of the log within a step as numbers of events."""
    first, last = bounds
    return tuple(
        (trace.work[begin].position, trace.work[end].position)
        for begin, end in stretches
        if first <= begin < last
    )
