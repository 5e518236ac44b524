"""Loops whose rounds are all alike, so that a trace of memory and time runs only a few of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class CountsRounds(Protocol):
    """A recording that runs a few rounds of a loop, and counts how many others each of them represents."""

    def rounds(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items whose rounds are to be run."""
        ...


_recording: CountsRounds | None = None


@contextlib.contextmanager
def abridged_for(recording: CountsRounds) -> Iterator[None]:
    """Let a recording decide, in a ``with`` block, which rounds of the loops of :func:`rounds` run."""
    global _recording
    before, _recording = _recording, recording
    try:
        yield
    finally:
        _recording = before


def rounds(items: Iterable[T]) -> Iterator[T]:
    """Iterate over the items of a loop: over all of them in a run, over a few in a trace.

    Rounds other than the first and the last must take the same memory, and leave nothing allocated except what
    ``memory.HostMemory`` gave them. A trace runs the first, the second in place of all up to the last, and the last;
    three more if another loop of ``rounds`` works on the items and may read two of them ahead.

    If work on an item continues later, the trace has to know to which round it belongs. For autograd it does: a
    backward pass counts as its forward did. Objects that this loop has given may be passed through ``rounds`` again, in
    any iterator: nothing is left out then, and all work from one object to the next counts as that object's round did.

    Args:
        items: a sequence, of which a trace leaves rounds out; or an iterator, of which it leaves out none.
    """
    return iter(items) if _recording is None else _recording.rounds(items)
