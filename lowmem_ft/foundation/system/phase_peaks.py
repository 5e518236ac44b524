"""The peaks of a real run, phase by phase, from counters that cost nothing to keep."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from lowmem_ft.foundation.system.device_memory import (
    before_each_reset,
    begin_phase,
    phase_peak_bytes,
    read_device_memory,
)
from lowmem_ft.foundation.system.host_memory import read_host_memory
from lowmem_ft.foundation.system.malloc import return_free_memory


class PhasePeaks:
    """The peaks of one device by phase; phases follow one another, and one that repeats keeps its highest peak.

    ``monitoring.MemoryMeter`` is for users and reads the same counters; it cannot take this one's place, because a run
    writes other numbers than it has. A run's peaks count from the process's start, as a limit of its host does, where
    the meter counts from its block; a phase on a CPU begins without what the C library kept of the one before; and
    where the system cannot reset a peak there are no phases, where the meter has what is held as a phase begins and
    ends. Each reads its peak before the other resets it.

    Attributes:
        by_phase: the most held in each phase: bytes of tensors on CUDA, of the process on a CPU. Empty if the system
            keeps one peak for all of them.
        reserved_bytes: the most that the caching allocator held; None on a CPU.

    Args:
        device: CUDA or a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.by_phase: dict[str, int] = {}
        self.reserved_bytes: int | None = 0 if device.type == "cuda" else None
        self._last_phase = ""

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count a block as one phase, even if it fails."""
        self._note_reserved()
        if phase != self._last_phase and self._device.type == "cpu":
            return_free_memory()  # or a phase begins with memory that the C library kept from the one before
        self._last_phase = phase
        can_be_told_apart = begin_phase(self._device)

        def note() -> None:
            self._note_reserved()
            if can_be_told_apart:
                peak_bytes = phase_peak_bytes(self._device)
                self.by_phase[phase] = max(peak_bytes, self.by_phase.get(phase, 0))

        with before_each_reset(note):
            try:
                yield
            finally:
                note()

    @property
    def peak_bytes(self) -> int:
        """Highest peak of all phases and of the time between them, in bytes."""
        return max(read_device_memory(self._device).peak_bytes, *self.by_phase.values(), 0)

    @property
    def host_peak_bytes(self) -> int:
        """Bytes of host memory that the process held at its highest."""
        return self.peak_bytes if self._device.type == "cpu" else read_host_memory().peak_bytes

    def _note_reserved(self) -> None:
        if self.reserved_bytes is not None:
            self.reserved_bytes = max(self.reserved_bytes, torch.cuda.max_memory_reserved(self._device))
