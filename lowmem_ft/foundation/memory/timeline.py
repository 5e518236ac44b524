"""Allocations and frees in the order in which a program made them: the requests that an allocator would serve."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lowmem_ft.foundation.memory.category import Category, Phase, Place


@dataclass(slots=True, kw_only=True)
class Allocation:
    """One storage. Its use may become known only after its birth, as with a gradient: it is set then.

    Args:
        size_bytes: size before an allocator's rounding.
        category: its use.
        phase: the program's phase at its birth.
        module: qualified name of the module it was made in or for, such as ``model.layers.3.mlp``; empty outside any.
        stream: the stream whose pool it comes from; 0 is the default stream.
        place: device or host.
        asked_bytes: for pinned memory, which comes in whole pages, the size of the request; 0: ``size_bytes``.
    """

    size_bytes: int
    category: Category = "temporary"
    phase: Phase = "forward"
    module: str = ""
    stream: int = 0
    place: Place = "device"
    asked_bytes: int = 0


class Event(NamedTuple):
    """One event of an allocation; ``empty_cache`` concerns no allocation and has -1."""

    kind: str  # Literal["malloc", "free", "empty_cache"]
    allocation: int


@dataclass
class Timeline:
    """Events in order, and the allocations that they name by index.

    A free is recorded where the memory becomes reusable on its stream. An allocation without a free lives to the end.
    """

    allocations: list[Allocation] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def malloc(self, allocation: Allocation) -> int:
        """Append a birth; return the index by which to free it."""
        self.allocations.append(allocation)
        index = len(self.allocations) - 1
        self.events.append(Event("malloc", index))
        return index

    def free(self, index: int) -> None:
        """Append the death of a live allocation."""
        self.events.append(Event("free", index))

    def empty_cache(self) -> None:
        """Append a request to give cached memory back to the driver."""
        self.events.append(Event("empty_cache", -1))

    def live_bytes(self, places: Sequence[Place] = ("device",)) -> Iterator[int]:
        """Yield bytes alive in some places after each event, unrounded: what an exact allocator would hold."""
        return self._live_bytes([one.size_bytes if one.place in places else 0 for one in self.allocations])

    def most_bytes_of(self, indices: Collection[int]) -> int:
        """Return the most bytes that some allocations, by index, hold at once."""
        if not indices:
            return 0
        all_sizes = enumerate(self.allocations)
        return max(self._live_bytes([one.size_bytes if at in indices else 0 for at, one in all_sizes]))

    def _live_bytes(self, sizes: Sequence[int]) -> Iterator[int]:
        return itertools.accumulate(
            [
                sizes[index] if kind == "malloc" else -sizes[index] if kind == "free" else 0
                for kind, index in self.events
            ]
        )

    def alive_at(self, position: int) -> list[int]:
        """Return indices of the allocations alive right after the event at ``position``, in order of birth."""
        alive: dict[int, None] = {}
        for kind, index in self.events[: position + 1]:
            if kind == "malloc":
                alive[index] = None
            elif kind == "free":
                del alive[index]
        return list(alive)
