"""Order of a program's streams, events and memory, identified by the numbers that a virtual GPU gives them.

Device memory is judged by how torch's caching allocator hands it out: a freed block may go to the next allocation from
the same stream's pool, in the order of that stream. Other streams that have used the block are not waited for, unless
``Tensor.record_stream`` has named them. Which block an allocation gets is the allocator's luck. So a stream that uses
a new allocation has to come after the last uses of all blocks that its pool had back by then.

Source: pytorch, c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping

from lowmem_ft.foundation.memory.allocator.caching_allocator import SMALL_SIZE
from lowmem_ft.virtual_gpu.races.happens_before import (
    COMPUTE,
    HOST,
    Access,
    Clock,
    Conflict,
    HappensBefore,
    Memory,
    Span,
)

Pool = tuple[int, bool]
"""A stream, and True for its pool of small blocks."""


class StreamOrder:
    """Checks each access to memory as a program makes it.

    Streams, events and allocations are the recorder's numbers; a stream of None is the host.
    """

    def __init__(self) -> None:
        self._judge = HappensBefore()
        self._agents: dict[int | None, int] = {None: HOST, 0: COMPUTE}
        self._events: dict[int, Clock] = {}
        self._memories: dict[int, Memory] = {}
        self._pool_of: dict[int, Pool] = {}
        self._recorded: dict[int, set[int]] = {}
        self._last_uses: dict[Pool, Mapping[int, Access]] = {}

    @property
    def conflicts(self) -> list[Conflict]:
        """The conflicts found so far; the index of a conflict's memory is the allocation's."""
        return self._judge.conflicts

    # --- orderings ----------------------------------------------------------------------------------------------------

    def record_event(self, event: int, stream: int) -> None:
        """Record an event after all that the stream has been given."""
        self._events[event] = self._judge.record(self._agent(stream))

    def wait_event(self, event: int, stream: int | None) -> None:
        """Let a stream, or the host, continue after an event; one that was never recorded is over, as in CUDA."""
        self._judge.wait(self._agent(stream), self._events.get(event, {}))

    def wait_stream(self, other: int, stream: int | None) -> None:
        """Let a stream, or the host, continue after all that another stream has been given."""
        self._judge.wait(self._agent(stream), self._judge.record(self._agent(other)))

    def synchronize(self) -> None:
        """Let the host continue after all that every stream has been given."""
        for stream in list(self._agents):
            if stream is not None:
                self.wait_stream(stream, None)

    def clock(self, stream: int | None) -> Clock:
        """Return how much of every agent's work a stream, or the host, knows to be over."""
        return self._judge.clock(self._agent(stream))

    # --- memory -------------------------------------------------------------------------------------------------------

    def allocated(self, index: int, num_bytes: int, stream: int | None) -> None:
        """Take memory from a stream's pool, or, with None, from the host's."""
        self._memories[index] = memory = Memory(index=index)
        if stream is not None:
            pool = self._pool_of[index] = stream, num_bytes <= SMALL_SIZE
            memory.before = self._last_uses.get(pool, {})

    def freed(self, index: int) -> None:
        """Give memory back: to its pool, or, if it was the host's, once nothing on the device uses it any more."""
        memory = self._memories.pop(index, None)
        pool = self._pool_of.pop(index, None)
        if memory is None or pool is None:
            return
        clocks = [self._judge.record(self._agent(stream)) for stream in self._recorded.pop(index, ())]
        last = dict(self._last_uses.get(pool, {}))
        for use in memory.accesses:
            # The allocator itself waits for the streams that record_stream has named.
            is_awaited = any(clock.get(use.agent, 0) >= use.epoch for clock in clocks)
            if not is_awaited and (use.agent not in last or last[use.agent].epoch <= use.epoch):
                last[use.agent] = use
        self._last_uses[pool] = last

    def record_stream(self, index: int, stream: int) -> None:
        """Note a ``Tensor.record_stream``."""
        self._recorded.setdefault(index, set()).add(stream)

    def access(self, index: int, stream: int | None, span: Span, *, writes: bool, what: object) -> None:
        """Note that a stream, or the host, reads or writes memory."""
        memory = self._memories.get(index)
        if memory is not None:
            self._judge.access(self._agent(stream), memory, span, writes=writes, what=what)

    def _agent(self, stream: int | None) -> int:
        agent = self._agents.get(stream)
        if agent is None:
            agent = self._agents[stream] = self._judge.new_agent()
        return agent
