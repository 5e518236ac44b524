"""The rounds of a log of work: what is done how often, and which events follow each other from round to round.

A trace does a few rounds of a loop, and one of them stands for others. Replayed as often as that, it takes what the
others took: the same kernels and copies, behind the same events. What one round waits for in the rounds before it are
events of their own there. They are found by counting: the fifth event that a round records follows the fifth of the
round before.

Exact, but for the rounding of sums of seconds: rounds that wait for events of the two rounds before them at most, and
that record as many events as these do. A wait for a round further back, or for one that records others, is a wait for
the event that was traced, which is long past: the stream is held up by too little then, if by anything at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from lowmem_ft.virtual_gpu.recording.work import ROUND_BEGIN, ROUND_END, Work

_NUM_ROUNDS_BACK = 2


@dataclass
class LoggedRound:
    """A stretch of a log that is done several times, one after the other.

    Args:
        times: how often, each time that the round around it is done.
        parts: what it consists of, in order: a range of entries, or a round of a loop in it.
        events: that it records, in order.
        follow: before it is done again, each of these first events becomes the second: a round later they are that.
    """

    times: int = 1
    parts: list[tuple[int, int] | LoggedRound] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    follow: list[tuple[int, int]] = field(default_factory=list)


def rounds_of(entries: Sequence[Work], ranges: Iterable[tuple[int, int]]) -> LoggedRound:
    """The whole log as one round.

    Args:
        entries: the log.
        ranges: first entry and the one after the last of what is replayed together; marks are by themselves.
    """
    open_rounds = [LoggedRound()]
    counts, loops = [1], [-1]
    before: dict[int, deque[list[int]]] = {}
    for first, last in ranges:
        entry = entries[first]
        if entry.kind == "mark" and entry.name == ROUND_BEGIN:
            inner = LoggedRound(times=entry.times // counts[-1])
            open_rounds[-1].parts.append(inner)
            open_rounds.append(inner)
            counts.append(entry.times)
            loops.append(entry.event)
        elif entry.kind == "mark" and entry.name == ROUND_END:
            done, _, loop = open_rounds.pop(), counts.pop(), loops.pop()
            rounds_before = before.setdefault(loop, deque(maxlen=_NUM_ROUNDS_BACK))
            done.follow = _following(rounds_before, done.events)
            rounds_before.append(done.events)
            open_rounds[-1].events += done.events
        else:
            open_rounds[-1].parts.append((first, last))
            if entry.kind == "record":
                open_rounds[-1].events.append(entry.event)
    return open_rounds[0]


def _following(before: Iterable[list[int]], events: list[int]) -> list[tuple[int, int]]:
    """Each event of the rounds before one, the earliest first, and the one that takes its place a round later."""
    alike = [events]
    for earlier in reversed(list(before)):
        if len(earlier) != len(events):
            break
        alike.insert(0, earlier)
    return [pair for two in pairwise(alike) for pair in zip(*two, strict=True)]
