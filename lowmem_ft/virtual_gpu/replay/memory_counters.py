"""``torch.cuda.memory_stats`` of a trace: its timeline so far, replayed through the caching allocator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lowmem_ft.foundation.memory.allocator.allocator_config import AllocatorConfig
from lowmem_ft.foundation.memory.allocator.block import Block
from lowmem_ft.foundation.memory.allocator.caching_allocator import SMALL_SIZE, CachingAllocator
from lowmem_ft.foundation.memory.timeline import Timeline

_POOLS = ("all", "large_pool", "small_pool")
_OF_BLOCKS = ("allocation", "allocated_bytes", "active", "active_bytes", "requested_bytes")
_OF_SEGMENTS = ("segment", "reserved_bytes", "inactive_split", "inactive_split_bytes")


@dataclass
class _Counter:
    """One number over time, with torch's names."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def add(self, amount: int) -> None:
        self.current += amount
        self.peak = max(self.peak, self.current)
        self.allocated += max(amount, 0)
        self.freed += max(-amount, 0)


@dataclass
class MemoryCounters:
    """Counters of the caching allocator for a growing timeline; each query replays what is new.

    The bytes cached inside split segments are counted at each query, so their peak is that of the queries.

    Args:
        timeline: the trace's timeline.
        config: settings of the allocator.
    """

    timeline: Timeline
    config: AllocatorConfig = field(default_factory=AllocatorConfig)

    def __post_init__(self) -> None:
        self._allocator = CachingAllocator(self.config)
        self._live: dict[int, Block] = {}
        self._position = 0
        self._reserved_bytes = 0
        self._counters = {
            (name, pool): _Counter() for name in (*_OF_BLOCKS, *_OF_SEGMENTS) for pool in _POOLS
        }

    def stats(self) -> dict[str, int]:
        """Return all counters, by the names that ``torch.cuda.memory_stats`` gives them."""
        self._catch_up()
        self._count_segments()
        stats = {
            f"{name}.{pool}.{part}": amount
            for (name, pool), counter in self._counters.items()
            for part, amount in vars(counter).items()
        }
        for name in ("oversize_allocations", "oversize_segments"):
            stats |= {f"{name}.{part}": 0 for part in vars(_Counter())}
        return {**stats, "num_alloc_retries": 0, "num_ooms": 0, "max_split_size": -1}

    def reset_peaks(self) -> None:
        """Start new peaks from the current values."""
        self._catch_up()
        for counter in self._counters.values():
            counter.peak = counter.current

    def reset_sums(self) -> None:
        """Reset the counts of allocations and frees."""
        self._catch_up()
        for counter in self._counters.values():
            counter.allocated = counter.freed = 0

    def _catch_up(self) -> None:
        events = self.timeline.events
        while self._position < len(events):
            kind, index = events[self._position]
            self._position += 1
            if kind == "empty_cache":
                self._allocator.empty_cache()
            elif kind == "malloc":
                self._malloc(index)
            elif index in self._live:
                block = self._live.pop(index)
                self._count_block(block, self.timeline.allocations[index].size_bytes, -1)
                self._allocator.free(block)
            if self._allocator.reserved_bytes != self._reserved_bytes:
                self._reserved_bytes = self._allocator.reserved_bytes
                self._count_segments()

    def _malloc(self, index: int) -> None:
        request = self.timeline.allocations[index]
        if request.place == "device" and request.size_bytes:
            self._live[index] = block = self._allocator.malloc(request.size_bytes, request.stream)
            self._count_block(block, request.size_bytes, 1)

    def _count_block(self, block: Block, requested_bytes: int, sign: int) -> None:
        amounts = (1, block.size, 1, block.size, requested_bytes)
        for name, amount in zip(_OF_BLOCKS, amounts, strict=True):
            for pool in ("all", "small_pool" if block.size <= SMALL_SIZE else "large_pool"):
                self._counters[name, pool].add(sign * amount)

    def _count_segments(self) -> None:
        totals = dict.fromkeys(((name, pool) for name in _OF_SEGMENTS for pool in _POOLS), 0)
        for pool, amounts in self._segments():
            for name, amount in zip(_OF_SEGMENTS, amounts, strict=True):
                totals[name, "all"] += amount
                totals[name, pool] += amount
        for key, total in totals.items():
            self._counters[key].add(total - self._counters[key].current)

    def _segments(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for segment in self._allocator.segments():
            free = [block.size for block in segment.blocks if not block.is_allocated]
            is_split = len(segment.blocks) > 1
            inactive = (len(free), sum(free)) if is_split else (0, 0)
            yield "small_pool" if segment.is_small else "large_pool", (1, segment.size, *inactive)
