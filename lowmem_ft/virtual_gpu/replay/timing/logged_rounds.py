"""A log of work as instructions: how often each part repeats, and which events follow each other from round to round.

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
from typing import NamedTuple

from lowmem_ft.virtual_gpu.calls.work import ROUND_BEGIN, ROUND_END, Work

_NUM_ROUNDS_BACK = 2

RECORD, COPY_TO_DEVICE, COPY_TO_HOST, WAIT, KERNELS, ROUND, SYNCHRONIZE, COLLECTIVE, HOST_COPY, MARK = range(
    10
)
"""Steps of a program: a kind of ``Work`` each, a run of kernels on one stream, or a round of an inner loop."""

_STEPS = {
    "kernel": KERNELS,
    "record": RECORD,
    "wait": WAIT,
    "synchronize": SYNCHRONIZE,
    "collective": COLLECTIVE,
    "host copy": HOST_COPY,
    "mark": MARK,
}
_OCCUPYING = ("kernel", "copy", "collective", "wait")
"""Kinds of work that keep a stream until a moment."""


class Instruction(NamedTuple):
    """One part of a log.

    Args:
        step: what it does, such as ``RECORD``.
        entry: the index of its entry in the log, the first if it has several.
        stream: the number of its stream in the program.
        other: for ``RECORD``, ``WAIT`` and ``SYNCHRONIZE``, the number of the event (-1: all streams); for a copy, 1 if
            the host waits for it; for ``KERNELS``, the number of the run; for ``ROUND``, that of the round.
    """

    step: int
    entry: int
    stream: int
    other: int


@dataclass
class LoggedRound:
    """A stretch of a log that repeats several times in a row.

    Args:
        times: repetitions, each time that the enclosing round runs.
        instructions: its parts, in order.
        rounds: rounds of inner loops, which instructions name by number.
        events: numbers of the events that it records, in order.
        follow: pairs of events; before each repetition, the first takes the time of the second, its successor a round
            later.
    """

    times: int = 1
    instructions: list[Instruction] = field(default_factory=list)
    rounds: list[LoggedRound] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    follow: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A log as instructions, with its streams and events numbered from 0.

    Args:
        whole: the log, as one round.
        streams: the number of each stream, in the order in which work first occupies them.
        num_events: number of events.
    """

    whole: LoggedRound
    streams: dict[int, int]
    num_events: int


def program_of(entries: Sequence[Work], firsts: Sequence[int]) -> Program:
    """Return a log as a program.

    Args:
        entries: the log.
        firsts: the first entry of each part that is replayed together: a run of kernels on one stream, or one entry of
            another kind.
    """
    parts = [entries[first] for first in firsts]
    occupied = [part.stream for part in parts if part.kind in _OCCUPYING]
    names = dict.fromkeys([*occupied, *[part.stream for part in parts]])
    streams = dict(zip(names, range(len(names)), strict=True))
    events: dict[int, int] = {}
    open_rounds = [LoggedRound()]
    counts, loops = [1], [-1]
    before: dict[int, deque[list[int]]] = {}
    num_runs = 0
    for first, entry in zip(firsts, parts, strict=True):
        current = open_rounds[-1]
        if entry.kind == "mark" and entry.name == ROUND_BEGIN:
            inner = LoggedRound(times=entry.times // counts[-1])
            current.instructions.append(Instruction(ROUND, first, 0, len(current.rounds)))
            current.rounds.append(inner)
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
            if entry.kind == "copy":
                step, other = COPY_TO_HOST if entry.to_host else COPY_TO_DEVICE, int(entry.blocking)
            else:
                step, other = _STEPS[entry.kind], -1
            if step == KERNELS:
                other, num_runs = num_runs, num_runs + 1
            elif step in (RECORD, WAIT, SYNCHRONIZE) and entry.event != -1:
                other = events.setdefault(entry.event, len(events))
            if step == RECORD:
                current.events.append(other)
            current.instructions.append(Instruction(step, first, streams[entry.stream], other))
    return Program(whole=open_rounds[0], streams=streams, num_events=len(events))


def _following(before: Iterable[list[int]], events: list[int]) -> list[tuple[int, int]]:
    """Pair each event of the previous rounds, the earliest first, with the event that takes its place a round later."""
    alike = [events]
    for earlier in reversed(list(before)):
        if len(earlier) != len(events):
            break
        alike.insert(0, earlier)
    return [pair for two in pairwise(alike) for pair in zip(*two, strict=True)]
