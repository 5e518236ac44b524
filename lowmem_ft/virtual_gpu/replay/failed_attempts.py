"""A trace without the attempts that ended out of memory, each of which has filled the device to its limit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from lowmem_ft.foundation.memory.timeline import Timeline
from lowmem_ft.virtual_gpu.calls.trace import Trace
from lowmem_ft.virtual_gpu.calls.work import ROUND_BEGIN, ROUND_END, Work
from lowmem_ft.virtual_gpu.recording.limited_memory import FailedAt


def without_failed_attempts(trace: Trace, failures: Sequence[FailedAt]) -> Trace:
    """Leave out what a program did between loading and its last attempt, except for the memory that it kept.

    Loading ends with the first allocation of a forward; where memory ran out before, nothing that was loaded and freed
    again remains. The last attempt begins with the first allocation on the device after the last failure.

    Args:
        trace: the trace of a program that has handled errors out of memory.
        failures: their moments, in order; at least one.

    Returns:
        The shorter trace.
    """
    allocations, events = trace.timeline.allocations, trace.timeline.events
    first, last = failures[0].num_events, failures[-1]
    begin = next(
        (
            position
            for position, (kind, index) in enumerate(events[:first])
            if kind == "malloc" and allocations[index].phase != "load"
        ),
        0,
    )
    end = next(
        (
            position
            for position, (kind, index) in enumerate(events)
            if position >= last.num_events and kind == "malloc" and allocations[index].place == "device"
        ),
        len(events),
    )
    born, freed = (
        {index for kind, index in events[begin:end] if kind == named} for named in ("malloc", "free")
    )
    gone = born & freed
    is_kept = [
        not (begin <= position < end and event.allocation in gone) for position, event in enumerate(events)
    ]
    positions = [0, *itertools.accumulate(is_kept)]
    work = [
        entry.at(positions[entry.position])
        for number, entry in enumerate(trace.work)
        if number >= last.num_entries or _is_kept(entry, is_of_load=entry.position < begin)
    ]
    return dataclasses.replace(
        trace, timeline=Timeline(allocations, [*itertools.compress(events, is_kept)]), work=work
    )


def _is_kept(entry: Work, *, is_of_load: bool) -> bool:
    """Keep work of loading, and what later entries may refer to: an event, or the begin of a round, by its end.

    A micro-batch may begin before the first forward does.
    """
    if entry.kind == "mark":
        return entry.name in (ROUND_BEGIN, ROUND_END)
    return is_of_load or entry.kind == "record"
