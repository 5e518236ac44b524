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

    @property
    def grown_size(self) -> int:
        """Its bytes, with those of the address space behind it that has no memory yet."""
        following = self.next
        return self.size + (following.size if following is not None and not following.is_mapped else 0)

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
        rest.previous, rest.next = self, (behind := self.next)
        if behind is not None:
            behind.previous = rest
        self.size, self.next = size, rest
        return rest

    def merge_free_neighbours(self) -> Block:
        """Join with neighbours that are free and mapped alike, taking them out of the pool; return the joint block."""
        following, previous, is_mapped = self.next, self.previous, self.is_mapped
        if following is not None and not following.is_allocated and following.is_mapped == is_mapped:
            self.pool.discard(following)
            self._absorb_next(following)
        if previous is None or previous.is_allocated or previous.is_mapped != is_mapped:
            return self
        self.pool.discard(previous)
        previous._absorb_next(self)
        return previous

    def _absorb_next(self, following: Block) -> None:
        self.size += following.size
        self.next = behind = following.next
        if behind is not None:
            behind.previous = self


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

    def best_fit(self, size: int) -> int | None:
        """Return the position of the block that serves a size: the smallest that holds it; None if none does.

        Blocks that can grow are compared by their grown size: while that shrinks, larger blocks are preferred.
        """
        keys, blocks = self._keys, self._block_by_key
        position, last = bisect_left(keys, size << _ADDRESS_BITS), len(keys) - 1
        if position > last:
            return None
        following = blocks[keys[position]].next
        # One that cannot grow is no larger, grown, than those behind it.
        if following is not None and not following.is_mapped:
            grown = blocks[keys[position]].grown_size
            while position < last and (behind := blocks[keys[position + 1]].grown_size) < grown:
                position, grown = position + 1, behind
        return position

    def pop(self, position: int) -> Block:
        """Remove and return the block at a position."""
        return self._block_by_key.pop(self._keys.pop(position))


# One integer orders by size, then address, and compares faster than a pair.
_ADDRESS_BITS = 64
