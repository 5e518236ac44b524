"""Moments of a device's memory: its contents after each event of a timeline, in few enough moments to draw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lowmem_ft.foundation.memory.category import Category, Phase
from lowmem_ft.foundation.memory.timeline import Allocation, Timeline
from lowmem_ft.reports.estimate_words import CATEGORY_WORDS

STACKED: tuple[Category, ...] = tuple(CATEGORY_WORDS)
"""The categories from the bottom of the stack to its top."""


class Moment(NamedTuple):
    """Contents of the device's memory right after an event.

    Args:
        at: where it is on the axis.
        position: number of events up to it, itself included.
        phase: phase of the latest allocation.
        module: module of the latest allocation.
        stacked_bytes: live bytes by category, in the order of ``STACKED``.
        total_bytes: their sum.
    """

    at: float
    position: int
    phase: Phase
    module: str
    stacked_bytes: tuple[int, ...]
    total_bytes: int


def moments_of(timeline: Timeline, sizes_bytes: Sequence[int] | None = None) -> Iterator[Moment]:
    """Yield the moment after each event that concerns the device, with its position as its place on the axis.

    Args:
        timeline: timeline of a run.
        sizes_bytes: size of each allocation, as an allocator rounds it; None: as requested.
    """
    index_in_stack = {category: index for index, category in enumerate(STACKED)}
    stacked_bytes = [0] * len(STACKED)
    total_bytes = 0
    latest = Allocation(size_bytes=0)
    for position, (kind, index) in enumerate(timeline.events, start=1):
        if kind == "empty_cache" or timeline.allocations[index].place != "device":
            continue
        allocation = timeline.allocations[index]
        size_bytes = allocation.size_bytes if sizes_bytes is None else sizes_bytes[index]
        if kind == "malloc":
            latest = allocation
        else:
            size_bytes = -size_bytes
        stacked_bytes[index_in_stack[allocation.category]] += size_bytes
        total_bytes += size_bytes
        yield Moment(position, position, latest.phase, latest.module, tuple(stacked_bytes), total_bytes)


def thinned(moments: Sequence[Moment], most: int) -> list[Moment]:
    """Return the highest and the last moment of each stretch of the axis, and the first of each phase.

    Args:
        moments: in order.
        most: number of stretches.

    Returns:
        Some of the moments, in order.
    """
    if not moments:
        return []
    start, length = moments[0].at, max(moments[-1].at - moments[0].at, 1e-12)
    kept: set[int] = set()
    highest, stretch, phase = 0, -1, None
    for index, moment in enumerate(moments):
        now = int((moment.at - start) / length * most)
        if now != stretch:
            kept |= {highest, max(0, index - 1)}
            highest, stretch = index, now
        elif moment.total_bytes > moments[highest].total_bytes:
            highest = index
        if moment.phase != phase:
            kept.add(index)
            phase = moment.phase
    return [moments[index] for index in sorted(kept | {highest, len(moments) - 1})]
