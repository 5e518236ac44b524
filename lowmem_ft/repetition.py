"""Loops whose rounds are all alike, of which a trace of memory and time needs only a few."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class CountsRounds(Protocol):
    """A recording that can count what is done now several times."""

    times: int
    """How many rounds the present one stands for."""


_recording: CountsRounds | None = None


@contextlib.contextmanager
def abridged_for(recording: CountsRounds) -> Iterator[None]:
    """Run the loops of :func:`rounds` in part, in a ``with`` block, and tell a recording what each round stands for."""
    global _recording
    before, _recording = _recording, recording
    try:
        yield
    finally:
        stand_for(1)
        _recording = before


def rounds(items: Sequence[T]) -> Iterator[tuple[T, int]]:
    """The items of a loop, each with how many rounds it stands for.

    Args:
        items: rounds that all take the same memory, and leave none behind; but for the first and the last.

    Yields:
        Every item, standing for itself. While a trace is recorded the first, the second in place of all up to the
        last, and the last; call :func:`stand_for` with the number before doing the round.
    """
    if _recording is None or len(items) <= 3:
        yield from ((item, 1) for item in items)
    else:
        yield from ((items[0], 1), (items[1], len(items) - 2), (items[-1], 1))


def stand_for(times: int) -> None:
    """Count what is done from now on so many times in the recording, if there is one."""
    if _recording is not None:
        _recording.times = times
