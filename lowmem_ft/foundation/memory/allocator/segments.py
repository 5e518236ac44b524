"""The source of the caching allocator's memory: segments of fixed size, or address ranges that grow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from lowmem_ft.foundation.memory.allocator.block import Block, BlockPool
from lowmem_ft.foundation.units import MIB, TIB

Action = Literal[
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
]


class TraceEntry(NamedTuple):
    """One action of the allocator, in the words of ``torch.cuda.memory._record_memory_history``.

    ``size`` is the size of the request (``alloc``, ``free_*``) or of the driver's memory (``segment_*``), in bytes. The
    address of an ``oom`` is the memory that was still free, as upstream has it.
    """

    action: Action
    address: int
    size: int
    stream: int


class Driver:
    """The memory that the driver has given out, under a limit. It gives out no address twice.

    Args:
        capacity_bytes: all of its memory; None: no limit.
        trace: receives entries; None: no trace.
    """

    def __init__(self, capacity_bytes: int | None, trace: list[TraceEntry] | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self._trace = trace
        self._lowest_address = self._highest_address = _FIRST_ADDRESS

    def continue_from(self, other: Driver) -> None:
        """Take over another driver's state."""
        self.reserved_bytes, self.peak_reserved_bytes = other.reserved_bytes, other.peak_reserved_bytes
        self._lowest_address, self._highest_address = other._lowest_address, other._highest_address

    def take(self, size: int) -> bool:
        """Reserve memory; return False if there is not enough."""
        reserved = self.reserved_bytes + size
        if self.capacity_bytes is not None and reserved > self.capacity_bytes:
            return False
        self.reserved_bytes = reserved
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved)
        return True

    def give_back(self, size: int) -> None:
        """Give reserved memory back."""
        self.reserved_bytes -= size

    def address_of_segment(self, size: int) -> int:
        """Return the start of fresh address space for a segment: ``cudaMalloc`` goes down, so later ones are lower.

        Among cached blocks of one size the allocator takes the lowest, so this decides how much is reserved by steps
        that free several large blocks of one size: with eager attention it was 4 to 9% on a T4 (tests/data/measured).
        """
        self._lowest_address = (self._lowest_address - size) // DRIVER_PAGE_BYTES * DRIVER_PAGE_BYTES
        return self._lowest_address

    def address_of_range(self, size: int, alignment: int) -> int:
        """Return the start of fresh address space into which memory is mapped as it is needed."""
        address = _round_up(self._highest_address, alignment)
        self._highest_address = address + size
        return address

    def record(self, action: Action, address: int, size: int, stream: int) -> None:
        """Append to the trace, if there is one."""
        if self._trace is not None:
            self._trace.append(TraceEntry(action, address, size, stream))


class FixedSegments:
    """Segments that are each one ``cudaMalloc``, and go back only in one piece.

    Args:
        driver: the source of memory.
    """

    def __init__(self, driver: Driver) -> None:
        self.heads: dict[int, Block] = {}
        """The first block of every segment, by its address."""
        self._driver = driver

    def take(self, pool: BlockPool, size: int, segment_size: int) -> Block | None:
        """Return a new segment as one free block that is in no pool; None if the driver has too little.

        Args:
            pool: the pool of the block.
            size: bytes that it must hold.
            segment_size: bytes of a segment for that size.
        """
        if not self._driver.take(segment_size):
            return None
        block = Block(pool, self._driver.address_of_segment(segment_size), segment_size)
        self.heads[block.address] = block
        self._driver.record("segment_alloc", block.address, segment_size, pool.stream)
        return block

    def release(self, block: Block) -> None:
        """Give a segment back whose only block is free."""
        assert not block.is_split
        assert not block.is_allocated
        block.pool.discard(block)
        del self.heads[block.address]
        self._driver.give_back(block.size)
        self._driver.record("segment_free", block.address, block.size, block.pool.stream)

    def release_cached(self, pools: Iterable[BlockPool]) -> None:
        """Give back every segment that is entirely free."""
        for pool in pools:
            for block in pool:
                if not block.is_split:
                    self.release(block)


class ExpandableSegments:
    """Address ranges, one for each pool, into which memory is mapped page by page as needed.

    Args:
        driver: the source of memory.
        large_page_size: bytes of a page of the large pool.
    """

    def __init__(self, driver: Driver, large_page_size: int) -> None:
        self.heads: dict[int, Block] = {}
        """The first block of every range, by its address."""
        self._driver = driver
        self._large_page_size = large_page_size

    def take(self, pool: BlockPool, size: int, segment_size: int) -> Block | None:
        """Return the lowest free stretch of enough length, mapped and in no pool; None if the driver has too little.

        Args:
            pool: the pool of the block.
            size: bytes that it must hold.
            segment_size: not used: only missing memory is mapped.
        """
        block = self._find(pool, size)
        if not block.is_mapped:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            unmapped = block.next
            assert unmapped is not None
            assert not unmapped.is_mapped
            mapped = self._map(unmapped, min(size - block.size, unmapped.size))
            if mapped is None:
                return None
            block = mapped
        pool.discard(block)
        return block

    def release_cached(self, pools: Iterable[BlockPool]) -> None:
        """Give back every page that no block in use touches."""
        for pool in pools:
            for block in pool:
                self._unmap(block)

    def _find(self, pool: BlockPool, size: int) -> Block:
        for address in sorted(pool.unmapped):
            start = pool.unmapped[address]
            if start.previous is not None and not start.previous.is_allocated:
                start = start.previous
            if _free_bytes_from(start, size) >= size:
                return start
        return self._new_range(pool, size)

    def _new_range(self, pool: BlockPool, size: int) -> Block:
        page = self._page_size(pool)
        range_size = _round_up(max(size, _RANGE_BYTES), page)
        # Aligned to its pages, so that an address determines its page.
        address = self._driver.address_of_range(range_size, alignment=page)
        block = Block(pool, address, range_size, is_mapped=False)
        self.heads[block.address] = block
        pool.add(block)
        return block

    def _map(self, block: Block, size: int) -> Block | None:
        """Map memory to the start of an unmapped block; return the cached block that it is now part of."""
        page = self._page_size(block.pool)
        size = _round_up(size, page)
        if not self._driver.take(size):
            return None
        block.pool.discard(block)
        if size < block.size:
            block.pool.add(block.split(size))
        block.is_mapped = True
        self._driver.record("segment_map", block.address, size, block.pool.stream)
        block = block.merge_free_neighbours()
        block.pool.add(block)
        return block

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages inside a cached block."""
        pool, page = block.pool, self._page_size(block.pool)
        first = _round_up(block.address, page)
        last = (block.address + block.size) // page * page
        if first >= last:
            return
        pool.discard(block)
        if first > block.address:
            inner = block.split(first - block.address)
            pool.add(block)
            block = inner
        if last < block.address + block.size:
            pool.add(block.split(last - block.address))
        block.is_mapped = False
        self._driver.give_back(last - first)
        self._driver.record("segment_unmap", first, last - first, pool.stream)
        pool.add(block.merge_free_neighbours())

    def _page_size(self, pool: BlockPool) -> int:
        return DRIVER_PAGE_BYTES if pool.is_small else self._large_page_size


DRIVER_PAGE_BYTES = 2 * MIB
"""The size of the driver's pages. Source: c10/cuda/CUDACachingAllocator.cpp, note "Expandable Segments"."""

# Upstream reserves 9/8 of the GPU's memory for each range, far more than a run fills; so does this.
_RANGE_BYTES = 16 * TIB
_FIRST_ADDRESS = 0x7F00_0000_0000


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _free_bytes_from(start: Block, enough: int) -> int:
    """Count the bytes of consecutive free blocks, mapped or not, from one on; stops once they are enough."""
    total = 0
    block: Block | None = start
    while block is not None and not block.is_allocated and total < enough:
        total += block.size
        block = block.next
    return total
