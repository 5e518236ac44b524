"""Loops whose rounds are all alike, of which a trace of memory and time needs only a few."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class CountsRounds(Protocol):
    """A recording that needs a few rounds of a loop, and counts how many others each of them stands for."""

    def rounds(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items whose rounds are to be done."""
        ...


_recording: CountsRounds | None = None


@contextlib.contextmanager
def abridged_for(recording: CountsRounds) -> Iterator[None]:
    """Let a recording say, in a ``with`` block, which rounds of the loops of :func:`rounds` are done."""
    global _recording
    before, _recording = _recording, recording
    try:
        yield
    finally:
        _recording = before


def rounds(items: Iterable[T]) -> Iterator[T]:
    """The items of a loop, all of them; a trace gets along with a few.

    Rounds but for the first and the last must take the same memory, and leave none behind but what they were given by
    ``memory.HostMemory``. A trace does the first, the second in place of all up to the last, and the last; three more
    where another loop of ``rounds`` works on the items and may read two of them ahead.

    Where the work on an item goes on later, the trace has to know which round it belongs to. Of autograd it does: a
    backward pass counts as its forward did. Objects that this loop has given may be put through ``rounds`` again, in
    any iterator: nothing is left out then, and all that is done from one of them to the next counts as that one did.

    Args:
        items: a sequence, of which a trace leaves rounds out; or an iterator, of which it leaves out none.
    """
    return iter(items) if _recording is None else _recording.rounds(items)
