"""What a timeline takes on a real device: its allocations, replayed by the caching allocator."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from lowmem_ft.memory.block import Block
from lowmem_ft.memory.caching_allocator import CachingAllocator, OutOfMemory
from lowmem_ft.memory.category import Place
from lowmem_ft.memory.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The allocator's counters over a timeline. Positions are indices of its events.

    Args:
        allocated_bytes: in use after each event; it ends before the event that did not fit.
        reserved_bytes: held from the driver after each event; likewise.
        block_bytes: what each allocation of the timeline really took, by its index; 0 if it lies elsewhere.
        peak_allocated_bytes: the most in use.
        peak_allocated_at: position of the event that first reached it; None if nothing was allocated.
        peak_reserved_bytes: the most held from the driver.
        peak_reserved_at: position of the event that first reached it; None likewise.
        num_retries: how often the cache had to be emptied to go on.
        out_of_memory: why it ended early; None if everything fit.
        out_of_memory_at: position of the event that did not fit; None likewise.
    """

    allocated_bytes: array[int]
    reserved_bytes: array[int]
    block_bytes: array[int]
    peak_allocated_bytes: int
    peak_allocated_at: int | None
    peak_reserved_bytes: int
    peak_reserved_at: int | None
    num_retries: int
    out_of_memory: OutOfMemory | None
    out_of_memory_at: int | None


def replay(
    timeline: Timeline, allocator: CachingAllocator, *, places: Sequence[Place] = ("device",)
) -> Replay:
    """The counters of an allocator that serves a timeline, up to its end or to the first request that does not fit.

    ``capacity_bytes`` changes nothing before the allocator reaches it: one replay without it answers for every device
    that its reserved peak fits into.

    Args:
        timeline: what is asked for, in order.
        allocator: a fresh one; left in its last state, so that a snapshot of it can be taken.
        places: where an allocation must lie to be served; others take nothing.

    Returns:
        The counters after every event, the peaks and the failure, if any.
    """
    allocations = timeline.allocations
    is_served = [allocation.place in places for allocation in allocations]
    live: dict[int, Block] = {}
    allocated, reserved = array("q"), array("q")
    block_bytes = array("q", bytes(8 * len(allocations)))
    peak_allocated, peak_allocated_at = 0, None
    peak_reserved, peak_reserved_at = 0, None
    failure: OutOfMemory | None = None
    for position, (kind, index) in enumerate(timeline.events):
        if kind == "empty_cache":
            allocator.empty_cache()
        elif not is_served[index]:
            pass
        elif kind == "free":
            allocator.free(live.pop(index))
        else:
            request = allocations[index]
            try:
                live[index] = block = allocator.malloc(request.size_bytes, request.stream)
                block_bytes[index] = block.size
            except OutOfMemory as error:
                failure = error
            if allocator.allocated_bytes > peak_allocated:
                peak_allocated, peak_allocated_at = allocator.allocated_bytes, position
            if allocator.peak_reserved_bytes > peak_reserved:
                peak_reserved, peak_reserved_at = allocator.peak_reserved_bytes, position
            if failure is not None:
                break
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
    return Replay(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        block_bytes=block_bytes,
        peak_allocated_bytes=peak_allocated,
        peak_allocated_at=peak_allocated_at,
        peak_reserved_bytes=peak_reserved,
        peak_reserved_at=peak_reserved_at,
        num_retries=allocator.num_retries,
        out_of_memory=failure,
        out_of_memory_at=None if failure is None else len(allocated),
    )
