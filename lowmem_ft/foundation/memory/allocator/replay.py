"""Device memory that a timeline takes: its allocations, replayed by the caching allocator."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from lowmem_ft.foundation.memory.allocator.block import Block
from lowmem_ft.foundation.memory.allocator.caching_allocator import CachingAllocator, OutOfMemory
from lowmem_ft.foundation.memory.category import Place
from lowmem_ft.foundation.memory.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The allocator's counters over a timeline. Positions are indices of its events.

    Args:
        allocated_bytes: bytes in use after each event; ends before the event that did not fit.
        reserved_bytes: bytes held from the driver after each event; ends likewise.
        block_bytes: size of the block that served each allocation of the timeline, by its index; 0 if it is stored
            elsewhere.
        peak_allocated_bytes: the most bytes in use.
        peak_allocated_at: position of the event that first reached it; None if nothing was allocated.
        peak_reserved_bytes: the most bytes held from the driver.
        peak_reserved_at: position of the event that first reached it; None likewise.
        num_retries: number of times that the cache had to be emptied to continue.
        out_of_memory: the reason for an early end; None if everything fit.
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
    """Return the counters of an allocator that serves a timeline, up to its end or the first request that does not fit.

    ``capacity_bytes`` changes nothing before the allocator reaches it: one replay without it answers for every device
    that can hold its reserved peak.

    Args:
        timeline: requests and frees, in order.
        allocator: a fresh one; left in its last state, so that a snapshot of it can be taken.
        places: places whose allocations are served; those of others take nothing.

    Returns:
        The counters after every event, the peaks and the failure, if any.
    """
    replaying = Replaying(timeline, allocator, places=places)
    replaying.run()
    return replaying.counters()


class Replaying:
    """A replay in progress; see :func:`replay`."""

    def __init__(
        self, timeline: Timeline, allocator: CachingAllocator, *, places: Sequence[Place] = ("device",)
    ) -> None:
        self._timeline = timeline
        self._allocator = allocator
        self._places = places
        self._live: dict[int, Block] = {}
        self._allocated, self._reserved = array("q"), array("q")
        self._block_bytes = array("q", bytes(8 * len(timeline.allocations)))
        self._peak_allocated: tuple[int, int | None] = (0, None)
        self._peak_reserved: tuple[int, int | None] = (0, None)
        self._failure: OutOfMemory | None = None

    def run(self, until: int | None = None) -> None:
        """Continue to the event at a position, or to the end; stop early at the first request that does not fit."""
        allocator, live, block_bytes = self._allocator, self._live, self._block_bytes
        allocations, events = self._timeline.allocations, self._timeline.events
        is_served = [allocation.place in self._places for allocation in allocations]
        peak_allocated, peak_reserved = self._peak_allocated[0], self._peak_reserved[0]
        reserved = allocator.reserved_bytes
        add_allocated, add_reserved = self._allocated.append, self._reserved.append
        begin = len(self._allocated)
        for position, (kind, index) in enumerate(itertools.islice(events, begin, until), begin):
            if kind == "empty_cache":
                allocator.empty_cache()
                reserved = allocator.reserved_bytes
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
                    self._failure = error
                reserved = allocator.reserved_bytes
                if allocator.allocated_bytes > peak_allocated:
                    peak_allocated = allocator.allocated_bytes
                    self._peak_allocated = peak_allocated, position
                if allocator.peak_reserved_bytes > peak_reserved:
                    peak_reserved = allocator.peak_reserved_bytes
                    self._peak_reserved = peak_reserved, position
                if self._failure is not None:
                    break
            add_allocated(allocator.allocated_bytes)
            add_reserved(reserved)

    def counters(self) -> Replay:
        """Return the counters so far."""
        peak_allocated, peak_allocated_at = self._peak_allocated
        peak_reserved, peak_reserved_at = self._peak_reserved
        return Replay(
            allocated_bytes=self._allocated,
            reserved_bytes=self._reserved,
            block_bytes=self._block_bytes,
            peak_allocated_bytes=peak_allocated,
            peak_allocated_at=peak_allocated_at,
            peak_reserved_bytes=peak_reserved,
            peak_reserved_at=peak_reserved_at,
            num_retries=self._allocator.num_retries,
            out_of_memory=self._failure,
            out_of_memory_at=None if self._failure is None else len(self._allocated),
        )

    def reserved_bytes_on(self, timeline: Timeline) -> tuple[int, array[int]]:
        """Return what an unlimited allocator would hold if it served another timeline from this point on.

        Args:
            timeline: a timeline with the same events so far.

        Returns:
            The peak, and the bytes after each further event.
        """
        allocator, copies = self._allocator.copied()
        # Allocations without bytes have no copy: any block does.
        live = {index: copies.get(block, block) for index, block in self._live.items()}
        allocations, reserved = timeline.allocations, array("q")
        for kind, index in timeline.events[len(self._allocated) :]:
            if kind == "empty_cache":
                allocator.empty_cache()
            elif allocations[index].place not in self._places:
                pass
            elif kind == "free":
                allocator.free(live.pop(index))
            else:
                live[index] = allocator.malloc(allocations[index].size_bytes, allocations[index].stream)
            reserved.append(allocator.reserved_bytes)
        return allocator.peak_reserved_bytes, reserved
