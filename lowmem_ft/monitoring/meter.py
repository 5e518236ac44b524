"""Peaks of a program by phase, in a ``with`` block around any PyTorch code."""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.system.device_memory import before_each_reset
from lowmem_ft.monitoring.counters import Counters, MemoryUsage, counters_of, device_to_measure
from lowmem_ft.monitoring.text_table import WIDTH, share, size, text_table

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass
class PhaseUsage:
    """Memory of one phase, or at one mark.

    Attributes:
        path: names of the phases around it, the outermost first, then its own.
        is_mark: whether it is one moment; its peak is the one since a phase last began or ended.
        runs: number of times it ran.
        peak: the most of all its runs.
        now: at the mark, or at the end of the last run.
    """

    path: tuple[str, ...]
    is_mark: bool = False
    runs: int = 0
    peak: MemoryUsage = field(default_factory=MemoryUsage)
    now: MemoryUsage = field(default_factory=MemoryUsage)

    @property
    def name(self) -> str:
        """Path as text, such as ``step/forward``."""
        return "/".join(self.path)


class MemoryMeter:
    """Measures memory in a block, and in phases of it.

    ::

        with MemoryMeter() as meter:
            model = load()
            meter.mark("after load")
            for batch in batches:
                with meter.phase("forward"):
                    loss = model(**batch).loss
                with meter.phase("backward"):
                    loss.backward()
        print(meter.table())

    Phases may be nested; one that repeats keeps its highest peak. On CUDA the counters are those of torch's allocator;
    inside a ``VirtualGPU`` those of its trace; on a CPU the process's bytes, or with ``exact`` every storage.

    Cost: nothing per operator. A phase reads counters at its beginning and end, and waits for no kernel. ``exact`` on a
    CPU sees every operator; docs/monitoring.md has the seconds.

    Each phase resets the peaks: ``torch.cuda.max_memory_allocated()`` is then the phase's. The value it would have
    returned is :attr:`peak_since_start`. Meters may be nested. A program that calls
    ``torch.cuda.reset_peak_memory_stats`` itself makes the meter lose the peak that it resets.

    Args:
        device: the device to measure; None: CUDA's current device if there is one, else the CPU.
        exact: count every storage of a CPU to the byte; CUDA's counters are always exact. Tensors from before the block
            count if Python knows them.
        label: name of the run in its table and its JSON.

    Attributes:
        phases: phases and marks, in the order of their first run.

    Raises:
        UserError: if the device is not there, or is neither CUDA nor a CPU.
    """

    def __init__(
        self, device: torch.device | str | None = None, *, exact: bool = False, label: str = ""
    ) -> None:
        self.device = device_to_measure(device)
        self.label = label
        self.phases: list[PhaseUsage] = []
        self._exact = exact
        self._counters: Counters | None = None
        self._running = contextlib.ExitStack()
        self._open: list[PhaseUsage] = []
        self._whole = PhaseUsage(path=("whole block",))
        self._before = MemoryUsage()
        self._notes: dict[str, str] = {}

    def __enter__(self) -> Self:
        if self._whole.runs:
            raise UserError(
                "A MemoryMeter measures one block, and this one was used already. Create a new one."
            )
        with contextlib.ExitStack() as running:
            self._counters = counters_of(self.device, running, exact=self._exact)
            self._before = self._counters.peak_since_start()
            self._notes = self._counters.notes
            self._counters.reset_peak()
            running.enter_context(before_each_reset(self._fold))
            self._running = running.pop_all()
        self._begin(self._whole)
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            self._end(self._whole)
        finally:
            self._counters = None
            self._running.__exit__(*exception)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count a block as one phase, even if it fails.

        Args:
            name: name within the phase around it.

        Raises:
            UserError: outside the meter's own block.
        """
        self._needs_counters()
        phase = self._find(name, is_mark=False)
        self._next()
        self._begin(phase)
        try:
            yield
        finally:
            self._end(phase)

    def mark(self, name: str) -> MemoryUsage:
        """Record the memory at this moment, and the peak since the last phase began or ended.

        Args:
            name: name within the phase around it.

        Returns:
            The memory at this moment.

        Raises:
            UserError: outside the meter's own block.
        """
        counters = self._needs_counters()
        mark = self._find(name, is_mark=True)
        mark.runs += 1
        mark.now = counters.now()
        mark.peak = mark.peak.highest(counters.peak()).highest(mark.now)
        return mark.now

    @property
    def peak(self) -> MemoryUsage:
        """The most of the whole block so far."""
        if self._counters is not None:
            self._fold()
        return self._whole.peak

    @property
    def peak_since_start(self) -> MemoryUsage:
        """The peak that torch's counters would report if this meter had never reset them."""
        return self.peak.highest(self._before)

    def table(self) -> str:
        """Return the memory of each phase as a table 80 columns wide: peaks, and allocated bytes at its end.

        ``idle`` is the share of reserved bytes in no tensor, see :attr:`MemoryUsage.fragmentation`. A mark has no runs.
        """
        _ = self.peak
        rows = [_row(phase) for phase in (*self.phases, self._whole)]
        headings = ("", "runs", "allocated", "at end", "reserved", "idle", "process", "host")
        title = f"Memory of {self.device}" + (f": {self.label}" if self.label else "") + ", peaks by phase"
        notes = (
            line for about, note in self._notes.items() for line in textwrap.wrap(f"{about}: {note}", WIDTH)
        )
        return "\n".join((title, text_table(headings, rows), *notes))

    def to_json(self) -> str:
        """Return the table's numbers and more as JSON, in bytes."""
        _ = self.peak
        return json.dumps(
            {
                "device": str(self.device),
                "label": self.label,
                "peak": self._whole.peak.as_dict(),
                "peak_since_start": self.peak_since_start.as_dict(),
                "phases": [
                    {
                        "name": phase.name,
                        "is_mark": phase.is_mark,
                        "runs": phase.runs,
                        "peak": phase.peak.as_dict(),
                        "now": phase.now.as_dict(),
                    }
                    for phase in self.phases
                ],
                "notes": self._notes,
            },
            indent=2,
        )

    def _needs_counters(self) -> Counters:
        if self._counters is None:
            raise UserError(
                "A MemoryMeter measures inside its block. Write `with MemoryMeter() as meter:` around it."
            )
        return self._counters

    def _find(self, name: str, *, is_mark: bool) -> PhaseUsage:
        path = (*(phase.path[-1] for phase in self._open[1:]), name)
        for phase in self.phases:
            if phase.path == path and phase.is_mark == is_mark:
                return phase
        self.phases.append(PhaseUsage(path=path, is_mark=is_mark))
        return self.phases[-1]

    def _begin(self, phase: PhaseUsage) -> None:
        phase.runs += 1
        self._open.append(phase)

    def _end(self, phase: PhaseUsage) -> None:
        self._next()
        phase.now = self._needs_counters().now()
        self._open.remove(phase)

    def _next(self) -> None:
        """Give the peak so far to the open phases, and begin a new one."""
        self._needs_counters().reset_peak()  # which calls `_fold`, of other meters too

    def _fold(self) -> None:
        peak = self._needs_counters().peak()
        for phase in self._open:
            phase.peak = phase.peak.highest(peak)


def _row(phase: PhaseUsage) -> tuple[str, ...]:
    usage = phase.now if phase.is_mark else phase.peak
    return (
        "  " * (len(phase.path) - 1) + phase.path[-1],
        "" if phase.is_mark else str(phase.runs),
        size(usage.allocated_bytes),
        size(phase.now.allocated_bytes),
        size(usage.reserved_bytes),
        share(usage.fragmentation),
        size(usage.process_bytes),
        size(usage.host_bytes),
    )
