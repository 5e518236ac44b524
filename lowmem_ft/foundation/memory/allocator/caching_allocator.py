"""PyTorch's CUDA caching allocator, without a GPU: the same blocks, segments and failures for the same requests.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.11 to 2.14. Constants and choices are named as there.

Left out: private pools of CUDA graphs, and ``record_stream`` (the caller frees when memory is free on its stream).
The driver's addresses, which decide between two cached blocks of equal size, are assumed to go down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowmem_ft.foundation.memory.allocator.allocator_config import AllocatorConfig
from lowmem_ft.foundation.memory.allocator.block import Block, BlockPool
from lowmem_ft.foundation.memory.allocator.segments import (
    Driver,
    ExpandableSegments,
    FixedSegments,
    TraceEntry,
)
from lowmem_ft.foundation.units import MIB, format_bytes

MIN_BLOCK_SIZE = 512  # all sizes are rounded up to it
SMALL_SIZE = 1 * MIB  # the largest request for the small pool
SMALL_SEGMENT_SIZE = 2 * MIB
MIN_LARGE_ALLOCATION = 10 * MIB  # smaller large requests share a segment, others have their own
LARGE_SEGMENT_ROUNDING = 2 * MIB


class OutOfMemory(Exception):
    """A request does not fit, even after all cached memory went back to the driver.

    Args:
        requested_bytes: size of the request, before rounding.
        allocated_bytes: bytes in use at that moment.
        reserved_bytes: bytes held from the driver at that moment.
        capacity_bytes: the lowest limit on the bytes held.
    """

    def __init__(
        self, *, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, capacity_bytes: int
    ) -> None:
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.capacity_bytes = capacity_bytes
        super().__init__(
            f"{format_bytes(requested_bytes)} do not fit: {format_bytes(reserved_bytes)} of "
            f"{format_bytes(capacity_bytes)} are reserved, {format_bytes(allocated_bytes)} of them in use."
        )


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One piece of memory from the driver; for an expandable segment, one mapped stretch.

    Its blocks are the allocator's own, which change with further requests.
    """

    address: int
    size: int
    stream: int
    is_small: bool
    is_expandable: bool
    blocks: list[Block]


class CachingAllocator:
    """One device's allocator: ``malloc`` and ``free``, and the counters that ``torch.cuda.memory_stats`` shows.

    The process holds exactly what it reserves: segments are whole pages of the driver (2 MiB), unless
    ``large_segment_size_mb`` is odd.

    Args:
        config: its settings; None: the defaults.
        capacity_bytes: bytes that ``cudaMalloc`` can give in all; None: no limit.
        allowed_bytes: the cap of ``torch.cuda.set_per_process_memory_fraction``, in bytes; None: not set. Upstream
            compares it with the size of a segment before it takes one, and collects garbage only if it is set.
            Pages of expandable segments can exceed it by less than one page.
        trace: receives entries of what happens; None: no trace.
    """

    def __init__(
        self,
        config: AllocatorConfig | None = None,
        *,
        capacity_bytes: int | None = None,
        allowed_bytes: int | None = None,
        trace: list[TraceEntry] | None = None,
    ) -> None:
        self.config = config or AllocatorConfig()
        self.allocated_bytes = 0
        self.peak_allocated_bytes = 0
        self.num_retries = 0
        self._allowed_bytes = allowed_bytes
        self._driver = Driver(capacity_bytes, trace)
        self._is_traced = trace is not None
        self._segments: FixedSegments | ExpandableSegments = FixedSegments(self._driver)
        if self.config.expandable_segments:
            self._segments = ExpandableSegments(self._driver, self.config.large_segment_size_bytes)
        self._pools: dict[tuple[bool, int], BlockPool] = {}
        self._num_large_searches = 0
        self._rounds_to_divisions = max(self.config.roundup_power2_divisions) > 1
        self._is_expandable = self.config.expandable_segments
        self._max_split_size = self.config.max_split_size_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes held from the driver, in use or cached."""
        return self._driver.reserved_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes ever held from the driver."""
        return self._driver.peak_reserved_bytes

    def malloc(self, size_bytes: int, stream: int = 0) -> Block:
        """Allocate memory for a tensor.

        Args:
            size_bytes: size before rounding; 0 takes nothing.
            stream: the stream whose pool serves the request.

        Returns:
            A block with its address and its real size, by which to free it.

        Raises:
            OutOfMemory: if it does not fit, even after all cached memory that can go back to the driver went.
        """
        if size_bytes == 0:
            return Block(self._pool(True, stream), 0, 0)
        size = self._rounded(size_bytes)
        is_small = size <= SMALL_SIZE
        pool = self._pools.get((is_small, stream))
        if pool is None:
            pool = self._pool(is_small, stream)
        block = self._cached_block(pool, size) or self._new_block(pool, size)
        if block is None:
            raise self._out_of_memory(size_bytes, size, stream)
        if block.size != size and self._should_split(block, size):
            rest = block.split(size)
            rest.freed_at = self._num_large_searches
            pool.add(rest)
        block.is_allocated = True
        block.requested_bytes = size_bytes
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        if self._is_traced:
            self._driver.record("alloc", block.address, size_bytes, stream)
        return block

    def free(self, block: Block) -> None:
        """Take a block back; it is cached for the next request of its stream."""
        if block.size == 0:
            return
        assert block.is_allocated, "a block can only be freed once"
        block.is_allocated = False
        self.allocated_bytes -= block.size
        if self._is_traced:
            for action in ("free_requested", "free_completed"):
                self._driver.record(action, block.address, block.requested_bytes, block.pool.stream)
        block.requested_bytes = 0
        block = block.merge_free_neighbours()
        block.freed_at = self._num_large_searches
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give cached memory that is not tied to a block in use back to the driver."""
        self._segments.release_cached(self._pools_in_order())

    def copied(self) -> tuple[CachingAllocator, dict[Block, Block]]:
        """Return a copy of the allocator in the same state, without a trace, and the copy of each block."""
        other = CachingAllocator(
            self.config, capacity_bytes=self._driver.capacity_bytes, allowed_bytes=self._allowed_bytes
        )
        other.allocated_bytes, other.peak_allocated_bytes = self.allocated_bytes, self.peak_allocated_bytes
        other.num_retries, other._num_large_searches = self.num_retries, self._num_large_searches
        other._driver.continue_from(self._driver)
        copies: dict[Block, Block] = {}
        for address, head in self._segments.heads.items():
            previous, block = None, head
            while block is not None:
                pool = other._pool(block.pool.is_small, block.pool.stream)
                copies[block] = previous = block.copied(pool, after=previous)
                block = block.next
            other._segments.heads[address] = copies[head]
        return other, copies

    def segments(self) -> list[Segment]:
        """Return all the memory that is held, by address."""
        heads = self._segments.heads
        return [
            self._snapshot(blocks)
            for address in sorted(heads)
            for blocks in _mapped_stretches(heads[address])
        ]

    # --- choosing a block --------------------------------------------------------------------------------------------

    def _rounded(self, size: int) -> int:
        if self._rounds_to_divisions:
            divisions = self.config.roundup_divisions(size)
            if divisions > 1 and size > MIN_BLOCK_SIZE * divisions:
                return _round_up_to_division(size, divisions)
        return -(-size // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE

    def _pool(self, is_small: bool, stream: int) -> BlockPool:
        pool = self._pools.get((is_small, stream))
        if pool is None:
            pool = self._pools[is_small, stream] = BlockPool(stream, is_small)
        return pool

    def _pools_in_order(self) -> list[BlockPool]:
        """Return the large pools first, then the small ones, by stream."""
        return [self._pools[key] for key in sorted(self._pools)]

    def _cached_block(self, pool: BlockPool, size: int) -> Block | None:
        """Return the best fit among the free blocks, taken out of the pool; None if there is no fit."""
        if not pool.is_small:
            self._num_large_searches += 1
        position = pool.best_fit(size)
        if position is None:
            return None
        if self._max_split_size is not None and not self._may_serve(pool[position], size):
            return None
        return pool.pop(position)

    def _may_serve(self, block: Block, size: int) -> bool:
        """Reserve unsplittable blocks for requests of about their size."""
        max_split_size = self.config.max_split_size_bytes
        assert max_split_size is not None
        if size < max_split_size:
            return block.size < max_split_size
        return block.size < size + (
            self.config.max_non_split_rounding_bytes or self.config.large_segment_size_bytes
        )

    def _should_split(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if self._is_expandable or block.pool.is_small:
            return rest >= MIN_BLOCK_SIZE
        max_split_size = self._max_split_size
        return rest > SMALL_SIZE and (max_split_size is None or size < max_split_size)

    # --- taking from the driver, and giving back to it ---------------------------------------------------------------

    def _new_block(self, pool: BlockPool, size: int) -> Block | None:
        """Take a block from the driver; if it refuses, release unsplittable cached blocks, then the cache."""
        self._collect_garbage()
        block = self._take(pool, size)
        if block is None and self._release_unsplittable(pool, size):
            block = self._take(pool, size)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = self._take(pool, size)
        return block

    def _take(self, pool: BlockPool, size: int) -> Block | None:
        segment_size = self._segment_size(size)
        if self._allowed_bytes is not None and self.reserved_bytes + segment_size > self._allowed_bytes:
            return None
        return self._segments.take(pool, size, segment_size)

    def _segment_size(self, size: int) -> int:
        if size <= SMALL_SIZE:
            return SMALL_SEGMENT_SIZE
        if size < MIN_LARGE_ALLOCATION:
            return self.config.large_segment_size_bytes
        return -(-size // LARGE_SEGMENT_ROUNDING) * LARGE_SEGMENT_ROUNDING

    def _release_unsplittable(self, pool: BlockPool, size: int) -> bool:
        """Give back one unsplittable block that covers the request, else several, the largest first."""
        segments, max_split_size = self._segments, self.config.max_split_size_bytes
        if max_split_size is None or isinstance(segments, ExpandableSegments):
            return False
        position = pool.position_of_at_least(size)
        if position < len(pool):
            segments.release(pool[position])
            return True
        released = 0
        while released < size and len(pool) and pool[-1].size >= max_split_size:
            released += pool[-1].size
            segments.release(pool[-1])
        return released >= size

    def _collect_garbage(self) -> None:
        """Above the threshold, give back large segments that have been idle for at least the average time."""
        segments, share = self._segments, self.config.garbage_collection_threshold
        if self._allowed_bytes is None or share == 0 or isinstance(segments, ExpandableSegments):
            return
        excess = self.reserved_bytes - int(share * self._allowed_bytes)
        large_pools = [pool for pool in self._pools_in_order() if not pool.is_small]
        idle = [block for pool in large_pools for block in pool if not block.is_split]
        ages = {block.address: self._num_large_searches - block.freed_at for block in idle}
        reclaimed = 0
        while reclaimed < excess and idle:
            average = sum(ages[block.address] for block in idle) / len(idle)
            kept = [block for block in idle if ages[block.address] < average]
            for block in idle:
                if ages[block.address] >= average:
                    reclaimed += block.size
                    segments.release(block)
            idle = kept

    def _out_of_memory(self, size_bytes: int, size: int, stream: int) -> OutOfMemory:
        limits = [limit for limit in (self._driver.capacity_bytes, self._allowed_bytes) if limit is not None]
        capacity = min(limits)
        self._driver.record("oom", max(capacity - self.reserved_bytes, 0), size, stream)
        return OutOfMemory(
            requested_bytes=size_bytes,
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
            capacity_bytes=capacity,
        )

    # --- a snapshot --------------------------------------------------------------------------------------------------

    def _snapshot(self, blocks: list[Block]) -> Segment:
        return Segment(
            address=blocks[0].address,
            size=sum(block.size for block in blocks),
            stream=blocks[0].pool.stream,
            is_small=blocks[0].pool.is_small,
            is_expandable=self.config.expandable_segments,
            blocks=blocks,
        )


def _round_up_to_division(size: int, divisions: int) -> int:
    """Round up to the next of the parts into which the interval between two powers of two is divided."""
    power = 1 << (size.bit_length() - 1)
    part = power // divisions
    return -(-size // part) * part


def _mapped_stretches(head: Block) -> Iterator[list[Block]]:
    stretch: list[Block] = []
    block: Block | None = head
    while block is not None:
        if block.is_mapped:
            stretch.append(block)
        elif stretch:
            yield stretch
            stretch = []
        block = block.next
    if stretch:
        yield stretch
