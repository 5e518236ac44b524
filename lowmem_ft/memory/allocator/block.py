"""Stretches of device memory as the caching allocator sees them, and the pools of free ones it chooses from."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class Block:
    """A stretch of a segment: in use, cached, or address space without memory behind it.

    Args:
        pool: the pool that holds it while it is free.
        address: address of its first byte.
        size: its bytes.
        is_mapped: whether memory backs the addresses; only expandable segments have addresses without.
    """

    __slots__ = (
        "address",
        "freed_at",
        "is_allocated",
        "is_mapped",
        "next",
        "pool",
        "previous",
        "requested_bytes",
        "size",
    )

    def __init__(self, pool: BlockPool, address: int, size: int, is_mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.is_mapped = is_mapped
        self.is_allocated = False
        self.requested_bytes = 0
        self.freed_at = 0
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def is_split(self) -> bool:
        """True if the segment holds other blocks too."""
        return self.previous is not None or self.next is not None

    def copied(self, pool: BlockPool, after: Block | None) -> Block:
        """Copy the block into another pool, after another neighbour; adds the copy to the pool if it is free."""
        other = Block(pool, self.address, self.size, self.is_mapped)
        other.is_allocated, other.requested_bytes = self.is_allocated, self.requested_bytes
        other.freed_at = self.freed_at
        other.previous = after
        if after is not None:
            after.next = other
        if not self.is_allocated:
            pool.add(other)
        return other

    def split(self, size: int) -> Block:
        """Keep the first ``size`` bytes; return the rest as a block of its own."""
        rest = Block(self.pool, self.address + size, self.size - size, self.is_mapped)
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.size, self.next = size, rest
        return rest

    def merge_free_neighbours(self) -> Block:
        """Join with neighbours that are free and mapped alike, taking them out of the pool; return the joint block."""
        following = self.next
        if following is not None and self._joins(following):
            self.pool.discard(following)
            self._absorb_next(following)
        previous = self.previous
        if previous is None or not self._joins(previous):
            return self
        self.pool.discard(previous)
        previous._absorb_next(self)
        return previous

    def _joins(self, neighbour: Block) -> bool:
        return not neighbour.is_allocated and neighbour.is_mapped == self.is_mapped

    def _absorb_next(self, following: Block) -> None:
        self.size += following.size
        self.next = following.next
        if self.next is not None:
            self.next.previous = self


class BlockPool:
    """The free blocks of one stream and one size class, the smallest first and at equal size the lowest address.

    Args:
        stream: the stream whose requests they serve.
        is_small: whether they serve requests up to 1 MiB.
    """

    __slots__ = ("_block_by_key", "_keys", "is_small", "stream", "unmapped")

    def __init__(self, stream: int, is_small: bool) -> None:
        self.stream = stream
        self.is_small = is_small
        self.unmapped: dict[int, Block] = {}
        """Address space without memory, by address."""
        self._keys: list[int] = []
        self._block_by_key: dict[int, Block] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Block]:
        return iter([self._block_by_key[key] for key in self._keys])

    def __getitem__(self, position: int) -> Block:
        return self._block_by_key[self._keys[position]]

    def position_of_at_least(self, size: int) -> int:
        """Return the position of the smallest block that holds a size; the pool's length if none does."""
        return bisect_left(self._keys, size << _ADDRESS_BITS)

    def add(self, block: Block) -> None:
        """Add a free block."""
        if not block.is_mapped:
            self.unmapped[block.address] = block
            return
        key = block.size << _ADDRESS_BITS | block.address
        insort(self._keys, key)
        self._block_by_key[key] = block

    def discard(self, block: Block) -> None:
        """Remove a block of the pool."""
        if not block.is_mapped:
            del self.unmapped[block.address]
            return
        key = block.size << _ADDRESS_BITS | block.address
        del self._keys[bisect_left(self._keys, key)]
        del self._block_by_key[key]

    def pop(self, position: int) -> Block:
        """Remove and return the block at a position."""
        return self._block_by_key.pop(self._keys.pop(position))


# One integer orders by size, then address, and compares faster than a pair.
_ADDRESS_BITS = 64
