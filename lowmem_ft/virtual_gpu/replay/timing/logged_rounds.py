"""Rounds of a log of work: how often each part repeats, and which events follow each other from round to round.

A trace runs a few rounds of a loop, and one of them represents others. Replayed as often as that, it takes the time of
those others: the same kernels and copies, behind the same events. The events of earlier rounds that a round waits for
are different ones in each round. They are found by counting: the fifth event that a round records follows the fifth of
the round before.

This is exact, except for the rounding of sums of seconds, for rounds that wait for events of at most the two rounds
before them and record as many events as these do. A wait for a round further back, or for one that records another
number of events, becomes a wait for the traced event, which is long past: the stream then waits too briefly, if at all.
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
    """A stretch of a log that repeats several times in a row.

    Args:
        times: repetitions, each time that the enclosing round runs.
        parts: its parts, in order: a range of entries, or a round of an inner loop.
        events: events that it records, in order.
        follow: pairs of events; before each repetition, the first takes the time of the second, its successor a round
            later.
    """

    times: int = 1
    parts: list[tuple[int, int] | LoggedRound] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    follow: list[tuple[int, int]] = field(default_factory=list)


def rounds_of(entries: Sequence[Work], ranges: Iterable[tuple[int, int]]) -> LoggedRound:
    """Return the whole log as one round.

    Args:
        entries: the log.
        ranges: for each part that is replayed together, its first entry and the one after its last; marks are parts of
            their own.
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
    """Pair each event of the previous rounds, the earliest first, with the event that takes its place a round later."""
    alike = [events]
    for earlier in reversed(list(before)):
        if len(earlier) != len(events):
            break
        alike.insert(0, earlier)
    return [pair for two in pairwise(alike) for pair in zip(*two, strict=True)]
