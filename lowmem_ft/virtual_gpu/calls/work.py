"""A program's requests to a GPU, in order: kernels, copies, events; ``clock.py`` computes their time."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Literal

from lowmem_ft.foundation.memory.timeline import Timeline


@dataclass(slots=True)
class Work:
    """One entry of the log.

    Args:
        kind: ``kernel`` runs on a stream; ``copy`` moves bytes over the host link on a stream; ``collective`` exchanges
            bytes with the other ranks on a stream; ``record`` puts an event on a stream and ``wait`` lets a stream wait
            for one; ``synchronize`` lets the host wait for an event, or for all streams if ``event`` is -1; ``host
            copy`` is a copy within host memory, which the host makes itself; ``mark`` takes no time: it names a moment.
        position: number of events that the timeline of memory had when it was issued.
        stream: the stream it runs on.
        name: name of the operator, or of the moment.
        flops: floating-point operations.
        dtype: type of the operands of the products, such as ``bfloat16``; empty where there are no products.
        num_bytes: bytes read and written in device memory; for a copy, moved over the host link, or within host memory;
            for a collective, sent by each rank.
        event: the event of ``record``, ``wait`` or ``synchronize``; for the begin of a round, the number of its loop.
        blocking: for a copy, whether the host waits for its end.
        to_host: for a copy, its direction; each has a copy engine of its own.
        times: the number of entries like this one that it represents: its round runs that often, as a whole.
        launches: for a kernel, how many kernels CUDA runs one after the other, before rounding up.
        python_operators: for a kernel, the operators that keep the host as long as the Python since the kernel before.
        by_triton: for a kernel, whether Triton launches it.
        shape: for a kernel whose time depends on more than operations and bytes, its sizes (``costs/shapes.py``).
    """

    kind: Literal["kernel", "copy", "collective", "record", "wait", "synchronize", "host copy", "mark"]
    position: int
    stream: int = 0
    name: str = ""
    flops: int = 0
    dtype: str = ""
    num_bytes: int = 0
    event: int = -1
    blocking: bool = False
    to_host: bool = False
    times: int = 1
    launches: float = 1
    python_operators: float = 0.0
    by_triton: bool = False
    shape: tuple[int, ...] = ()

    @property
    def num_launches(self) -> int:
        """For a kernel, the number of kernels that CUDA runs."""
        return max(1, math.ceil(self.launches - _ROUNDING))

    def at(self, position: int) -> Work:
        """Return the same work at another position of the timeline; seven times as fast as ``dataclasses.replace``."""
        return Work(self.kind, position, *_rest(self))


_rest = operator.attrgetter(*(one.name for one in fields(Work)[2:]))
"""Returns all fields of an entry after its position."""

_ROUNDING = 1e-6
"""Rounding error allowed in sums of shares of a launch."""

STEP_END = "step end"
POSTPONED = "postponed"
"""A moment that was named too early."""
BETWEEN_STEPS = "between steps"
"""A moment when nothing of the step before is left: no gradients, no batch."""
MICRO_BATCH_BEGIN, MICRO_BATCH_END = "micro-batch begin", "micro-batch end"
FOREIGN_BEGIN, FOREIGN_END = "foreign begin", "foreign end"
"""Begin and end of a stretch in which another program in the process holds memory of the device."""
ROUND_BEGIN, ROUND_END = "round begin", "round end"
"""Begin and end of one round of a loop, which represents ``times`` of the begin; rounds may nest."""


@dataclass
class WorkLog:
    """All work in the order in which the host issued it, with positions in the timeline of memory.

    Args:
        timeline: the timeline of memory.
        entries: the log.
        num_host_waits: how often the host has waited for the device.
        on_host_wait: called with the number of waits that have just come, to find where in the program they are.
    """

    timeline: Timeline
    entries: list[Work] = field(default_factory=list)
    num_host_waits: int = 0
    on_host_wait: Callable[[int], None] = lambda times: None
    _times: list[int] = field(default_factory=lambda: [1])  # that the open rounds represent

    def add(self, work: Work) -> None:
        """Log a kernel, a copy or a collective."""
        if work.blocking:
            self._host_waits(work.times)
        self.entries.append(work)

    @property
    def position(self) -> int:
        """Number of events that the timeline has."""
        return len(self.timeline.events)

    def mark(self, moment: str) -> None:
        """Name this moment."""
        self.entries.append(Work("mark", self.position, name=moment))

    def postpone(self, moment: str) -> None:
        """Let this be the moment that an earlier mark named last."""
        index = next(
            index
            for index in reversed(range(len(self.entries)))
            if (self.entries[index].kind, self.entries[index].name) == ("mark", moment)
        )
        self.entries[index] = Work("mark", self.entries[index].position, name=POSTPONED)
        self.mark(moment)

    def begin_round(self, loop: int, times: int) -> None:
        """Begin a round of a loop that represents this many rounds, those of enclosing loops included."""
        self.entries.append(Work("mark", self.position, name=ROUND_BEGIN, event=loop, times=times))
        self._times.append(times)

    def end_round(self) -> None:
        """End the innermost round."""
        self.mark(ROUND_END)
        self._times.pop()

    def record_event(self, event: int, stream: int) -> None:
        """Log an event after the stream's work so far."""
        self.entries.append(Work("record", self.position, stream, event=event))

    def wait_event(self, event: int, stream: int) -> None:
        """Let the stream's further work wait for the event."""
        self.entries.append(Work("wait", self.position, stream, event=event))

    def synchronize_event(self, event: int) -> None:
        """Let the host wait for the event."""
        self._host_waits(self._times[-1])
        self.entries.append(Work("synchronize", self.position, event=event))

    def synchronize(self, *, waits: bool = True) -> None:
        """Let the host wait for every stream.

        Args:
            waits: false where the host reads a number in its own memory, without waiting.
        """
        if not waits:
            return
        self._host_waits(self._times[-1])
        self.entries.append(Work("synchronize", self.position))

    def _host_waits(self, times: int) -> None:
        self.num_host_waits += times
        self.on_host_wait(times)
