"""A race, as plain values: two uses of the same memory that nothing orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowmem_ft.foundation.errors import RaceError
from lowmem_ft.foundation.memory.category import Category, Place
from lowmem_ft.foundation.units import format_bytes

MOST_SHOWN = 10
"""Number of races in an error's message."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """One of the two uses.

    Args:
        operator: the operator that reads or writes.
        writes: whether it writes.
        stream: its stream; 0 is the default one, None the host itself.
        places: the line that issued it, ``file:line in function``; then the line of another file that called that, and
            the innermost line outside any library, if these differ.
        gives_back: whether it ends the memory: unregisters or frees host memory that the program has pinned itself.
    """

    operator: str
    writes: bool
    stream: int | None
    places: tuple[str, ...]
    gives_back: bool = False

    def __str__(self) -> str:
        """Return operator, stream and places."""
        where = "the host" if self.stream is None else f"stream {self.stream}"
        return f"{self.operator} on {where} at {', called from '.join(self.places) or 'an unknown line'}"


@dataclass(frozen=True, kw_only=True)
class Race:
    """Two uses, at least one of which writes, and no event, wait or synchronisation that puts them in order.

    Args:
        first: the use that the program issued first.
        second: the use that it issued later, and which does not wait.
        is_reuse: whether they concern two tensors: the memory of the first was freed, and the second may get it.
        size_bytes: size of the memory, for the second.
        place: where that memory is.
        category: its use.
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
        """Kind of the race, in three words."""
        if self.is_reuse:
            return "reuse of memory"
        how = {True: "write", False: "read"}
        return (
            f"{'free' if self.second.gives_back else how[self.second.writes]} after {how[self.first.writes]}"
        )

    def __str__(self) -> str:
        """Return the race as a sentence."""
        of = f" of {self.module}" if self.module else ""
        memory = (
            f"{format_bytes(self.size_bytes)} of {self.place} memory ({self.category.replace('_', ' ')}{of})"
        )
        if self.is_reuse:
            return (
                f"{self.second} may get memory that is still in use: its {memory} may be memory that was freed after "
                f"{self.first}, and it does not wait until that is done."
            )
        verb = "overwrites" if self.second.writes else "reads"
        verb = "gives back" if self.second.gives_back else verb
        other = "writes" if self.first.writes else "reads"
        return f"{self.second} {verb} {memory} and does not wait for {self.first}, which {other} it."


def race_error(races: Sequence[Race]) -> RaceError:
    """Return the error with the first of the races, and the way to fix such races."""
    num_more = len(races) - MOST_SHOWN
    more = [f"{num_more} more {'is' if num_more == 1 else 'are'} in `races`."] if num_more > 0 else []
    return RaceError(
        f"Streams that use the same memory must be synchronized, but here they are not ({len(races)} "
        f"{'race' if len(races) == 1 else 'races'}). Let one wait for the other: `stream.wait_stream(other)`, "
        "`stream.wait_event(event)`; let the host wait with `event.synchronize()`; before memory that another stream "
        "has used is freed, call `record_stream` on the tensor.",
        *(str(race) for race in races[:MOST_SHOWN]),
        *more,
    )
