"""What a program asked a GPU to do, in order: kernels, copies, events; ``clock.py`` says how long it takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from lowmem_ft.memory.timeline import Timeline


@dataclass(slots=True)
class Work:
    """One entry of the log.

    Args:
        kind: ``kernel`` runs on a stream; ``copy`` moves bytes over the host link on a stream; ``collective`` exchanges
            bytes with the other processes on a stream; ``record`` and ``wait``
            put an event on a stream or a stream behind an event; ``synchronize`` lets the host wait for an event, or
            for all streams if ``event`` is -1; ``host copy`` is one within host memory, which the host makes itself;
            ``mark`` takes no time: it names a moment.
        position: number of events that the timeline of memory had when it was issued.
        stream: where it runs.
        name: of the operator, or of the moment.
        flops: floating-point operations.
        dtype: of the operands of the products, such as ``bfloat16``; empty where there are none.
        num_bytes: read and written in device memory; for a copy, moved over the host link, or within host memory; for
            a collective, sent by each process.
        event: of ``record``, ``wait``, ``synchronize``; of a round's begin: the number of its loop.
        blocking: of a copy: whether the host waits for its end.
        to_host: of a copy: its direction; each has a copy engine of its own.
        times: how many entries like this one it stands for: its round is done so often, as a whole.
        launches: of a kernel: how many of them CUDA runs one after the other, before they are rounded up.
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

    @property
    def num_launches(self) -> int:
        """Of a kernel: as many as CUDA runs."""
        return max(1, math.ceil(self.launches - _ROUNDING))

    def at(self, position: int) -> Work:
        """The same at another place of the timeline; seven times as fast as ``dataclasses.replace``."""
        return Work(
            self.kind,
            position,
            self.stream,
            self.name,
            self.flops,
            self.dtype,
            self.num_bytes,
            self.event,
            self.blocking,
            self.to_host,
            self.times,
            self.launches,
        )


_ROUNDING = 1e-6
"""Of sums of shares of a launch."""

STEP_END = "step end"
BETWEEN_STEPS = "between steps"
"""Nothing of the step before is left: no gradients, no batch."""
MICRO_BATCH_BEGIN, MICRO_BATCH_END = "micro-batch begin", "micro-batch end"
ROUND_BEGIN, ROUND_END = "round begin", "round end"
"""What is between them is one round of a loop, and done as often as ``times`` of the begin says; rounds may nest."""


@dataclass
class WorkLog:
    """All work in the order in which the host issued it, beside the timeline of memory.

    Args:
        timeline: of memory.
        entries: the log.
        num_host_waits: how often the host has waited for the device.
        on_host_wait: told how many waits have just come, to see where in the program.
    """

    timeline: Timeline
    entries: list[Work] = field(default_factory=list)
    num_host_waits: int = 0
    on_host_wait: Callable[[int], None] = lambda times: None

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

    def begin_round(self, loop: int, times: int) -> None:
        """What follows is a round of a loop, and stands for this many, those of rounds around it included."""
        self.entries.append(Work("mark", self.position, name=ROUND_BEGIN, event=loop, times=times))

    def end_round(self) -> None:
        """The innermost round is over."""
        self.mark(ROUND_END)

    def record_event(self, event: int, stream: int) -> None:
        """An event behind the stream's work so far."""
        self.entries.append(Work("record", self.position, stream, event=event))

    def wait_event(self, event: int, stream: int) -> None:
        """The stream's further work waits for the event."""
        self.entries.append(Work("wait", self.position, stream, event=event))

    def synchronize_event(self, event: int) -> None:
        """The host waits for the event."""
        self._host_waits(1)
        self.entries.append(Work("synchronize", self.position, event=event))

    def synchronize(self, *, waits: bool = True) -> None:
        """The host waits for every stream.

        Args:
            waits: false where a number on the host is read, for which nobody waits.
        """
        if not waits:
            return
        self._host_waits(1)
        self.entries.append(Work("synchronize", self.position))

    def _host_waits(self, times: int) -> None:
        self.num_host_waits += times
        self.on_host_wait(times)
