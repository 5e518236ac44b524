"""Optimizer steps beyond the traced ones: the caching allocator needs some until it requests no more memory."""

from __future__ import annotations

from lowmem_ft.foundation.memory.timeline import Timeline
from lowmem_ft.virtual_gpu.calls.trace import Trace

NUM_REPETITIONS = 2
"""Repetitions of the last traced step. In the recipes tried, reserved memory is constant from the third step on."""


def with_repeated_step(trace: Trace) -> Timeline:
    """Return the trace's timeline with its last step repeated, if that step leaves behind what it found.

    Args:
        trace: a trace with marks between its steps.

    Returns:
        The longer timeline; the trace's own if it has no such step.
    """
    quiet = trace.between_steps
    if len(quiet) < 2:
        return trace.timeline
    first, last = quiet[-2:]
    events = trace.timeline.events
    born_in_step = {index for kind, index in events[first:last] if kind == "malloc"}
    freed_in_step = [index for kind, index in events[first:last] if kind == "free"]
    found = [index for index in freed_in_step if index not in born_in_step]
    left = sorted(born_in_step.difference(freed_in_step))
    allocations = trace.timeline.allocations
    if [allocations[index].size_bytes for index in found] != [
        allocations[index].size_bytes for index in left
    ]:
        return trace.timeline
    longer = Timeline([*allocations], events[:last])
    successor = dict(zip(found, left, strict=True))
    for _ in range(NUM_REPETITIONS):
        successor = _repeat(longer, trace.timeline, first, last, successor)
    final = {original: successor[found_one] for found_one, original in zip(found, left, strict=True)}
    longer.events += [
        event._replace(allocation=final.get(event.allocation, event.allocation)) for event in events[last:]
    ]
    return longer


def _repeat(
    longer: Timeline, original: Timeline, first: int, last: int, alive: dict[int, int]
) -> dict[int, int]:
    """Append the step once more; ``alive`` and the result map what the step found to the current allocations."""
    stands_for = dict(alive)
    for kind, index in original.events[first:last]:
        if kind == "malloc":
            stands_for[index] = longer.malloc(original.allocations[index])
        elif kind == "free":
            longer.free(stands_for[index])
        else:
            longer.empty_cache()
    return {found: stands_for[left] for found, left in zip(alive, _left(original, first, last), strict=True)}


def _left(original: Timeline, first: int, last: int) -> list[int]:
    step = original.events[first:last]
    freed = {index for kind, index in step if kind == "free"}
    return [index for kind, index in step if kind == "malloc" and index not in freed]
