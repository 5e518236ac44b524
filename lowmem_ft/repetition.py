"""Loops whose rounds are all alike, of which a trace of memory and time needs only a few."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")


class CountsRounds(Protocol):
    """A recording that can count what is done now several times."""

    times: int
    """How many rounds the present one stands for."""

    def left_behind(self, tensor: Tensor) -> None:
        """Count a tensor's memory once for each of those rounds, for as long as the tensor lives."""
        ...


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
        items: rounds that all take the same memory, and leave none behind that :func:`left_behind` is not told of; but
            for the first and the last.

    Yields:
        Every item, standing for itself. While a trace is recorded the first, the second in place of all up to the
        last, and the last; call :func:`stand_for` with the number before doing the round.
    """
    if _recording is None or len(items) <= 3:
        yield from ((item, 1) for item in items)
    else:
        yield from ((items[0], 1), (items[1], len(items) - 2), (items[-1], 1))


def in_rounds(items: Sequence[T]) -> Iterator[T]:
    """The same for a loop whose body is done with an item before it asks for the next: it calls nothing else."""
    for item, times in rounds(items):
        stand_for(times)
        yield item


def stand_for(times: int) -> None:
    """Count what is done from now on so many times in the recording, if there is one."""
    if _recording is not None:
        _recording.times = times


def left_behind(tensor: Tensor) -> None:
    """Say that each round makes such a tensor and leaves it behind, in memory that no caching allocator serves."""
    if _recording is not None:
        _recording.left_behind(tensor)
