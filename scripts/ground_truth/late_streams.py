"""Streams, events and host memory of the stand-in for a CUDA device: see :mod:`late_copies`."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from lowmem_ft.virtual_gpu.races.happens_before import COMPUTE, HOST, Clock, HappensBefore, Memory


@dataclass(eq=False)
class Stream:
    """Work in its order, which runs when an agent waits for it; that of the compute stream runs at once."""

    order: HappensBefore
    agent: int
    waiting: list[Callable[[], None] | None] = field(default_factory=list)
    num_done: int = 0

    def record_event(self) -> Event:
        """See ``torch.cuda.Stream``."""
        return Event(self, len(self.waiting), self.order.record(self.agent))

    def wait_event(self, event: Event) -> None:
        """See ``torch.cuda.Stream``."""
        self.order.wait(self.agent, event.clock)
        self.give(event.happen)

    def synchronize(self) -> None:
        """See ``torch.cuda.Stream``."""
        self.record_event().synchronize()

    def give(self, work: Callable[[], None]) -> None:
        """Add work; compute runs at once."""
        self.waiting.append(work)
        if self.agent == COMPUTE:
            self.catch_up()

    def catch_up(self) -> None:
        """Run all work added so far."""
        self.run(len(self.waiting))

    def run(self, up_to: int) -> None:
        """Run the first ``up_to`` items of all work ever added."""
        while self.num_done < up_to:
            work, self.waiting[self.num_done] = self.waiting[self.num_done], None
            self.num_done += 1
            assert work is not None
            work()


@dataclass(frozen=True)
class Event:
    """A point in a stream's work."""

    stream: Stream
    num_before: int
    clock: Clock

    def happen(self) -> None:
        """Run the work before this point."""
        self.stream.run(self.num_before)

    def synchronize(self) -> None:
        """See ``torch.cuda.Event``."""
        self.stream.order.wait(HOST, self.clock)
        self.happen()


@dataclass(eq=False)
class Range:
    """Host addresses that were allocated together."""

    stop: int
    is_pinned: bool
    memory: Memory


class HostRanges:
    """The ranges of addresses that are the host's."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: dict[int, Range] = {}

    def add(self, tensor: Tensor, *, is_pinned: bool = False) -> None:
        """Register memory of the host until its storage is freed; memory that the driver has pinned is known."""
        storage = tensor.untyped_storage()
        if storage.nbytes() and self.find(storage.data_ptr()) is None:
            self.add_range(storage.data_ptr(), storage.nbytes(), is_pinned=is_pinned)
            weakref.finalize(storage, self.remove, storage.data_ptr()).atexit = False

    def add_range(self, start: int, num_bytes: int, *, is_pinned: bool) -> None:
        """Register memory of the host until it is removed."""
        assert self.find(start) is None, "registered twice"
        bisect.insort(self._starts, start)
        self._ranges[start] = Range(start + num_bytes, is_pinned, Memory())

    def remove(self, start: int) -> None:
        """Forget the range that begins there."""
        self._starts.remove(start)
        del self._ranges[start]

    def find(self, address: int) -> tuple[int, Range] | None:
        """Return the start of the range that contains an address, and the range."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._ranges[self._starts[index]].stop:
            return None
        return self._starts[index], self._ranges[self._starts[index]]
