"""Which work of several streams comes before which, as events say and nothing else, and what touches memory unordered.

CUDA promises an order inside a stream, through an event that one stream records and another (or the host) waits for,
and from what the host has given to a stream to what it does there. Everything else is luck. A vector clock for each
agent (a stream, or the host) knows of every other agent how much of its work is over; two accesses to the same bytes,
one of them a write, whose order no clock knows are a race, whichever came first this time.

Source: FastTrack: Efficient and Precise Dynamic Race Detection, 2009 (PLDI), and its epochs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

HOST, COMPUTE = 0, 1
"""The two agents that are always there: the host's thread, and the stream that computes."""

Clock = dict[int, int]
"""By agent, how much of its work is over."""


@dataclass(frozen=True)
class Access:
    """What an agent did to some bytes of a memory.

    Args:
        agent: who.
        epoch: when, by its own clock.
        start: first byte.
        stop: the one after the last.
        writes: whether it changes them.
        what: for people.
    """

    agent: int
    epoch: int
    start: int
    stop: int
    writes: bool
    what: str

    def covers(self, other: Access) -> bool:
        """Whether who comes after this access comes after the other one, too, and need not ask about it."""
        is_around = self.start <= other.start and other.stop <= self.stop
        return is_around and self.agent == other.agent and (self.writes or not other.writes)


@dataclass(eq=False)
class Memory:
    """Bytes that belong together, with the accesses that later ones have to come after.

    Args:
        judge: whose epochs these are.
    """

    judge: HappensBefore
    accesses: list[Access] = field(default_factory=list)
    is_watched: bool = False
    """Whether somebody will say when it is freed."""


class HappensBefore:
    """The clocks, and the judgement.

    Attributes:
        races: what was not ordered, in words.
    """

    def __init__(self) -> None:
        self.races: list[str] = []
        self._clocks: list[Clock] = [{HOST: 1}, {COMPUTE: 1}]
        self._host_version = 0
        self._seen_of_host = [0, 0]

    def new_agent(self) -> int:
        """One more stream."""
        self._clocks.append({len(self._clocks): 1})
        self._seen_of_host.append(-1)
        return len(self._clocks) - 1

    def record(self, agent: int) -> Clock:
        """An event in a stream: whoever waits for it comes after all that the stream has been given so far."""
        clock = self._launched(agent)
        snapshot = dict(clock)
        clock[agent] += 1
        return snapshot

    def wait(self, agent: int, event: Clock) -> None:
        """Let what an agent does from now on come after an event."""
        clock = self._clocks[agent]
        for other, epoch in event.items():
            if clock.get(other, 0) < epoch:
                clock[other] = epoch
        if agent == HOST:
            self._host_version += 1

    def access(self, agent: int, memory: Memory, start: int, stop: int, *, writes: bool, what: str) -> None:
        """Note an access, and every race of it with those before."""
        if agent == HOST:  # what it has launched before does not come after this
            self._clocks[HOST][HOST] += 1
            self._host_version += 1
        clock = self._launched(agent)
        new = Access(agent, clock[agent], start, stop, writes, what)
        kept = []
        for old in memory.accesses:
            overlap = old.start < stop and start < old.stop
            if overlap and (writes or old.writes) and clock.get(old.agent, 0) < old.epoch:
                self.races.append(f"{what} does not wait for {old.what}")
            if not new.covers(old):
                kept.append(old)
        memory.accesses = [*kept, new]

    def free(self, memory: Memory, agent: int = COMPUTE) -> None:
        """Memory goes back: the device's to its allocator, which hands it out again in the order of computing."""
        clock = self._launched(agent)
        for old in memory.accesses:
            if old.agent != agent and clock.get(old.agent, 0) < old.epoch:
                self.races.append(f"memory is freed while it is in use by {old.what}")

    def _launched(self, agent: int) -> Clock:
        """An agent's clock: what the host gives to a stream comes after what the host knows to be over."""
        if agent != HOST and self._seen_of_host[agent] != self._host_version:
            self._seen_of_host[agent] = self._host_version
            self.wait(agent, self._clocks[HOST])
        return self._clocks[agent]
