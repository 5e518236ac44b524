from __future__ import annotations

import numpy as np
import pytest

from lowmem_ft.foundation.memory.memory_estimate import ModelSize
from lowmem_ft.foundation.memory.timeline import Allocation, Timeline
from lowmem_ft.virtual_gpu.calls.trace import Trace
from lowmem_ft.virtual_gpu.calls.work import (
    BETWEEN_STEPS,
    MICRO_BATCH_BEGIN,
    MICRO_BATCH_END,
    STEP_END,
    Work,
    WorkLog,
)
from lowmem_ft.virtual_gpu.replay.timing.clock import Times
from lowmem_ft.virtual_gpu.replay.timing.memory_event_times import step_clock


def traced(program) -> Trace:
    timeline = Timeline()
    work = WorkLog(timeline)
    program(timeline, work)
    model = ModelSize(name="", parameters=0, trainable_parameters=0)
    return Trace(timeline=timeline, work=work.entries, model=model)


def times(ends, on_main=None) -> Times:
    ends = np.array(ends, dtype=np.float64)
    main = np.ones(len(ends), dtype=bool) if on_main is None else np.array(on_main)
    return Times(starts=ends, ends=ends, spent={}, computing=ends, is_on_main=main)


def step(timeline: Timeline, work: WorkLog) -> None:
    work.mark(STEP_END)
    work.mark(MICRO_BATCH_BEGIN)
    index = timeline.malloc(Allocation(size_bytes=1))
    work.add(Work("kernel", work.position))
    work.add(Work("copy", work.position, stream=1))
    timeline.free(index)
    work.add(Work("kernel", work.position))
    work.mark(MICRO_BATCH_END)
    work.mark(STEP_END)
    work.mark(BETWEEN_STEPS)


def test_an_event_is_reached_when_the_work_issued_before_it_is_done():
    trace = traced(step)
    assert trace.step_ends == [0, 6]
    found = step_clock(trace, times([1, 0, 2, 9, 4, 0, 0, 0], [1, 1, 1, 0, 1, 1, 1, 1]), (1, 6))
    assert found.positions.tolist() == [0, 1, 2]
    # The step began at second 1; a copy on another stream holds nothing up before the step's end.
    assert found.seconds.tolist() == [0.0, 1.0, 8.0]
    assert found.step_seconds == 8.0
    assert found.events == (0, 2)
    assert found.micro_batches == ((0, 2),)


def test_time_never_goes_back_where_a_stream_lags():
    found = step_clock(traced(step), times([0, 0, 5, 0, 3, 0, 0, 0]), (1, 6))
    assert found.seconds.tolist() == [0.0, 5.0, 5.0]


def rounds(timeline: Timeline, work: WorkLog) -> None:
    for number in (1, 8):
        work.begin_round(0, number)
        work.add(Work("kernel", work.position))
        timeline.free(timeline.malloc(Allocation(size_bytes=1)))
        work.end_round()


def test_rounds_that_represent_several_are_told():
    trace = traced(rounds)
    assert trace.repeated == [(3, 5)]
    found = step_clock(trace, times(range(6)), (0, 6), untraced=2, untraced_seconds=1.5)
    assert found.repeated == ((2, 4),)
    assert (found.untraced, found.untraced_seconds) == (2, pytest.approx(1.5))
