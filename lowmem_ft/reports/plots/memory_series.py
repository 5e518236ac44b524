"""Contents of a device's memory over a run, in few enough samples to draw, without losing a peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeVar

from lowmem_ft.memory.category import Category, Phase
from lowmem_ft.memory.timeline import Allocation, Timeline
from lowmem_ft.reports.wording import CATEGORY_WORDS

KeyT = TypeVar("KeyT")

STACKED: tuple[Category, ...] = tuple(CATEGORY_WORDS)
"""The categories from the bottom of the stack to its top."""


@dataclass(frozen=True, kw_only=True)
class MemorySample:
    """The device's memory right after one event of the timeline.

    Args:
        position: index of the event.
        phase: phase of the latest allocation.
        module: module of the latest allocation.
        stacked_bytes: live bytes by category, in the order of ``STACKED``.
        total_bytes: live bytes in all: their sum.
    """

    position: int
    phase: Phase
    module: str
    stacked_bytes: tuple[int, ...]
    total_bytes: int


def sample_memory(
    timeline: Timeline, max_moments: int = 1000, sizes_bytes: Sequence[int] | None = None
) -> list[MemorySample]:
    """Return the device memory by category, at the highest sample of each stretch of events and of each phase.

    Args:
        timeline: timeline of a run.
        max_moments: number of stretches to divide the events into.
        sizes_bytes: size of each allocation, as an allocator rounds it; None: as requested.

    Returns:
        Moments in order, each with its original values; empty if nothing was allocated on the device.
    """
    num_events = len(timeline.events)
    by_stretch: dict[int, MemorySample] = {}
    by_phase: dict[Phase, MemorySample] = {}
    for totals in _running_totals(timeline, sizes_bytes):
        _keep_highest(by_stretch, totals.position * max_moments // num_events, totals)
        _keep_highest(by_phase, totals.latest.phase, totals)
    samples = {sample.position: sample for sample in (*by_stretch.values(), *by_phase.values())}
    return [samples[position] for position in sorted(samples)]


def phase_bands(samples: Sequence[MemorySample], end: int) -> list[tuple[Phase, int, int]]:
    """Return the stretches of one phase each, end to end.

    Args:
        samples: in order.
        end: end of the last stretch.

    Returns:
        Phase, first position and the position after the last, for each stretch.
    """
    firsts = [next(run) for _, run in groupby(samples, key=lambda sample: sample.phase)]
    ends = [*(sample.position for sample in firsts[1:]), end]
    return [(first.phase, first.position, stop) for first, stop in zip(firsts, ends, strict=True)]


class _RunningTotals(NamedTuple):
    """Live bytes after an event; every instance shares one list, which keeps changing."""

    position: int
    total_bytes: int
    latest: Allocation
    stacked_bytes: list[int]


def _running_totals(timeline: Timeline, sizes_bytes: Sequence[int] | None) -> Iterator[_RunningTotals]:
    index_in_stack = {category: index for index, category in enumerate(STACKED)}
    stacked_bytes = [0] * len(STACKED)
    total_bytes = 0
    latest = Allocation(size_bytes=0)
    for position, (kind, index) in enumerate(timeline.events):
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
        yield _RunningTotals(position, total_bytes, latest, stacked_bytes)


def _keep_highest(highest: dict[KeyT, MemorySample], key: KeyT, totals: _RunningTotals) -> None:
    so_far = highest.get(key)
    if so_far is None or totals.total_bytes > so_far.total_bytes:
        highest[key] = MemorySample(
            position=totals.position,
            phase=totals.latest.phase,
            module=totals.latest.module,
            stacked_bytes=tuple(totals.stacked_bytes),
            total_bytes=totals.total_bytes,
        )
