"""The uses of a timeline's memory, at one moment and phase by phase."""

from __future__ import annotations

from collections.abc import Sequence

from lowmem_ft.foundation.memory.category import CATEGORIES, Category, Phase
from lowmem_ft.foundation.memory.timeline import Allocation, Timeline


def categories_at(timeline: Timeline, position: int, sizes: Sequence[int]) -> dict[Category, int]:
    """Return bytes alive right after an event, by use; every category is there.

    Args:
        timeline: the allocations.
        position: position of the event.
        sizes: bytes that each allocation counts for, by its index. With ``Replay.block_bytes`` the values sum to
            ``Replay.allocated_bytes[position]``.

    Returns:
        Bytes by category.
    """
    by_category: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
    for index in timeline.alive_at(position):
        by_category[timeline.allocations[index].category] += sizes[index]
    return by_category


def peak_by_phase(timeline: Timeline, live_bytes: Sequence[int]) -> dict[Phase, int]:
    """Return the most bytes alive in each phase, in the order of their first allocation.

    An event belongs to the phase of the latest allocation before it, or of its own.

    Args:
        timeline: the allocations.
        live_bytes: bytes alive after each event, such as ``Replay.allocated_bytes``; it may end early.

    Returns:
        Bytes by phase; phases without an allocation are missing.
    """
    peaks: dict[Phase, int] = {}
    phases: list[Phase] = [allocation.phase for allocation in timeline.allocations]
    phase: Phase | None = None
    peak = 0
    for (kind, index), live in zip(timeline.events, live_bytes, strict=False):
        if kind == "malloc" and (latest := phases[index]) != phase:
            if phase is not None:
                peaks[phase] = peak
            phase, peak = latest, peaks.setdefault(latest, 0)
        if live > peak:
            peak = live
    if phase is not None:
        peaks[phase] = peak
    return peaks


def allocation_at(timeline: Timeline, position: int) -> Allocation | None:
    """Return the allocation that an event concerns: at a peak, the one that made it, with its phase and its module.

    Args:
        timeline: the allocations.
        position: position of the event, such as ``Replay.peak_allocated_at``.

    Returns:
        The allocation; None for an event that concerns no allocation.
    """
    kind, index = timeline.events[position]
    return None if kind == "empty_cache" else timeline.allocations[index]
