"""Happens-before order of work on several streams, by events alone, and accesses to memory that it leaves unordered.

CUDA promises an order inside a stream, through an event that one stream records and another (or the host) waits for,
and from what the host has given to a stream to what the stream does with it. Everything else is luck. The vector clock
of each agent (a stream, or the host) holds how much of every other agent's work is over. Two accesses to the same
bytes, one of them a write, are a race if no clock orders them, whichever came first this time.

Source: FastTrack: Efficient and Precise Dynamic Race Detection, 2009 (PLDI), and its epochs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy

HOST, COMPUTE = 0, 1
"""The two agents that always exist: the host's thread, and the compute stream."""

Clock = dict[int, int]
"""Epoch up to which each agent's work is over, by agent."""

LARGEST_COMPARED = 2**26
"""Bytes, up to which tensors with gaps are compared byte by byte; larger ones whose extents overlap count as shared."""


@dataclass(frozen=True, slots=True)
class Span:
    """A range of bytes of a memory.

    Args:
        start: first byte.
        stop: the byte after the last.
        shape: the tensor's shape, if there are gaps between its elements; else empty.
        strides: its strides in bytes, likewise.
        itemsize: bytes of an element.
    """

    start: int
    stop: int
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    itemsize: int = 1

    def covers(self, other: Span) -> bool:
        """Return whether this certainly has all bytes of another span: it is equal, or has no gaps and encloses it."""
        if self.shape:
            return self == other
        return self.start <= other.start and other.stop <= self.stop

    def shares_bytes_with(self, other: Span) -> bool:
        """Return whether a byte is in both."""
        if self.start >= other.stop or other.start >= self.stop:
            return False
        if not self.shape and not other.shape:
            return True
        first = min(self.start, other.start)
        num_bytes = max(self.stop, other.stop) - first
        if num_bytes > LARGEST_COMPARED:
            return True
        touched = numpy.zeros(num_bytes, dtype=bool)
        self._of(touched, first)[...] = True
        return bool(other._of(touched, first).any())

    def _of(self, touched: numpy.ndarray, first: int) -> numpy.ndarray:
        part = touched[self.start - first : self.stop - first]
        if not self.shape:
            return part
        shape, strides = (*self.shape, self.itemsize), (*self.strides, 1)
        return numpy.lib.stride_tricks.as_strided(part, shape, strides)


@dataclass(frozen=True, slots=True)
class Access:
    """An agent's access to some bytes of a memory.

    Args:
        agent: the agent.
        epoch: its time, by the agent's own clock.
        span: the bytes.
        writes: whether it changes them.
        what: a description for people.
    """

    agent: int
    epoch: int
    span: Span
    writes: bool
    what: object


@dataclass(frozen=True)
class Conflict:
    """Two unordered accesses to the same bytes, one of them a write.

    Args:
        first: the access that the program made first.
        second: the later access.
        memory: the memory of both.
    """

    first: Access
    second: Access
    memory: Memory

    def __str__(self) -> str:
        """Return both accesses in words."""
        return f"{self.second.what} does not wait for {self.first.what}"


@dataclass(eq=False)
class Memory:
    """A block of memory, with the accesses that later ones have to come after.

    Args:
        accesses: what later accesses are compared with.
        index: its number, if it has one.
        before: by agent, the last access to what may have been the same bytes, before an allocator gave them to this.
    """

    accesses: list[Access] = field(default_factory=list)
    index: int = -1
    before: Mapping[int, Access] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    """Agents already checked against ``before``."""


class HappensBefore:
    """The vector clocks of all agents, and the conflicts they reveal.

    Attributes:
        conflicts: the unordered accesses found so far.
    """

    def __init__(self) -> None:
        self.conflicts: list[Conflict] = []
        self._clocks: list[Clock] = [{HOST: 1}, {COMPUTE: 1}]
        self._host_version = 0
        self._seen_of_host = [0, 0]

    def new_agent(self) -> int:
        """Add a stream and return its number."""
        self._clocks.append({len(self._clocks): 1})
        self._seen_of_host.append(-1)
        return len(self._clocks) - 1

    def record(self, agent: int) -> Clock:
        """Record an event in a stream: its waiters come after all that the stream has been given so far."""
        clock = self._launched(agent)
        snapshot = dict(clock)
        clock[agent] += 1
        return snapshot

    def wait(self, agent: int, event: Clock) -> None:
        """Order an agent's further work after an event."""
        _join(self._launched(agent), event)
        if agent == HOST:
            self._host_version += 1

    def clock(self, agent: int) -> Clock:
        """Return how much of every agent's work this agent knows to be over, its own included."""
        return dict(self._launched(agent))

    def access(self, agent: int, memory: Memory, span: Span, *, writes: bool, what: object) -> None:
        """Note an access, and every conflict of it with earlier ones."""
        if agent == HOST:  # work that it has launched before does not come after this
            self._clocks[HOST][HOST] += 1
            self._host_version += 1
        clock = self._launched(agent)
        new = Access(agent, clock[agent], span, writes, what)
        if memory.before and agent not in memory.asked:
            memory.asked.add(agent)
            late = [old for old in memory.before.values() if not _knows(clock, old)]
            self.conflicts += [Conflict(old, new, memory) for old in late]
        kept = []
        for old in memory.accesses:
            is_over = _knows(clock, old)
            if not is_over and (writes or old.writes) and span.shares_bytes_with(old.span):
                self.conflicts.append(Conflict(old, new, memory))
            # An access ordered after the new one is ordered after the old one, too, and need not be checked against it.
            is_implied = is_over and (writes or (not old.writes and old.agent == agent))
            if not (is_implied and span.covers(old.span)):
                kept.append(old)
        kept.append(new)
        memory.accesses = kept

    def _launched(self, agent: int) -> Clock:
        """Return an agent's clock: work launched on a stream comes after what the host knows to be over."""
        clock = self._clocks[agent]
        if agent != HOST and self._seen_of_host[agent] != self._host_version:
            self._seen_of_host[agent] = self._host_version
            _join(clock, self._clocks[HOST])
        return clock


def _join(clock: Clock, other: Clock) -> None:
    for agent, epoch in other.items():
        if clock.get(agent, 0) < epoch:
            clock[agent] = epoch


def _knows(clock: Clock, access: Access) -> bool:
    return clock.get(access.agent, 0) >= access.epoch
