"""A race, as plain values: two uses of the same memory that nothing puts in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowmem_ft.foundation.errors import RaceError
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.memory.category import Category, Place

MOST_SHOWN = 10
"""Races in an error's message."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """One of the two.

    Args:
        operator: that reads or writes.
        writes: whether it writes.
        stream: on which; 0 is the default one, None the host itself.
        places: the line that issued it, ``file:line in function``; then the line of another file that called that, and
            the innermost line that is no library's, as far as these are others.
        gives_back: whether it ends the memory: host memory that the program has pinned itself is unregistered or freed.
    """

    operator: str
    writes: bool
    stream: int | None
    places: tuple[str, ...]
    gives_back: bool = False

    def __str__(self) -> str:
        """Operator, stream and places."""
        where = "the host" if self.stream is None else f"stream {self.stream}"
        return f"{self.operator} on {where} at {', called from '.join(self.places) or 'an unknown line'}"


@dataclass(frozen=True, kw_only=True)
class Race:
    """Two uses, at least one of which writes, and no event, wait or synchronisation that puts them in order.

    Args:
        first: what the program issued first.
        second: what it issued then, and which does not wait.
        is_reuse: whether they mean two tensors: the memory of the first was freed, and the second may get it.
        size_bytes: of the memory, for the second.
        place: where that memory lies.
        category: what it is for.
        module: qualified name of the module it was made in or for; empty outside any.
    """

    first: MemoryUse
    second: MemoryUse
    is_reuse: bool
    size_bytes: int
    place: Place
    category: Category
    module: str

    @property
    def kind(self) -> str:
        """What went wrong, in three words."""
        if self.is_reuse:
            return "reuse of memory"
        how = {True: "write", False: "read"}
        return (
            f"{'free' if self.second.gives_back else how[self.second.writes]} after {how[self.first.writes]}"
        )

    def __str__(self) -> str:
        """In a sentence."""
        of = f" of {self.module}" if self.module else ""
        memory = (
            f"{format_bytes(self.size_bytes)} of {self.place} memory ({self.category.replace('_', ' ')}{of})"
        )
        if self.is_reuse:
            return (
                f"{self.second} may get memory that is still in use: its {memory} may be what was freed behind "
                f"{self.first}, and it does not wait for that."
            )
        verb = "overwrites" if self.second.writes else "reads"
        verb = "gives back" if self.second.gives_back else verb
        other = "writes" if self.first.writes else "reads"
        return f"{self.second} {verb} {memory} and does not wait for {self.first}, which {other} it."


def race_error(races: Sequence[Race]) -> RaceError:
    """The error that says so: the first of them, and how to mend such."""
    num_more = len(races) - MOST_SHOWN
    more = [f"{num_more} more {'is' if num_more == 1 else 'are'} in `races`."] if num_more > 0 else []
    return RaceError(
        "Streams must be put in order where they use the same memory, and here they are not "
        f"({len(races)} {'race' if len(races) == 1 else 'races'}). Let the one wait for the other: "
        "`stream.wait_stream(other)`, `stream.wait_event(event)`; the host by `event.synchronize()`; before memory "
        "goes that another stream has used, the tensor's own `record_stream`.",
        *(str(race) for race in races[:MOST_SHOWN]),
        *more,
    )
