"""Results of a trace that are the same on every GPU, computed once: its replay without limits, its prepared log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lowmem_ft.foundation.memory.allocator.allocator_config import AllocatorConfig
from lowmem_ft.foundation.memory.allocator.caching_allocator import CachingAllocator
from lowmem_ft.foundation.memory.allocator.replay import Replay, Replaying, replay
from lowmem_ft.foundation.memory.analysis import allocation_at, categories_at, peak_by_phase
from lowmem_ft.foundation.memory.category import Category, Phase, Place
from lowmem_ft.foundation.memory.timeline import Timeline
from lowmem_ft.virtual_gpu.calls.trace import Trace
from lowmem_ft.virtual_gpu.replay.host_peak import HostTensors
from lowmem_ft.virtual_gpu.replay.steady_state import NUM_REPETITIONS, with_repeated_step
from lowmem_ft.virtual_gpu.replay.timing.clock import Clock


@dataclass(frozen=True, kw_only=True)
class TensorPeaks:
    """Those fields of a ``MemoryEstimate`` that depend on the tensors alone, the same on every GPU."""

    allocated_peak_bytes: int
    by_category_at_peak: Mapping[Category, int]
    by_phase: Mapping[Phase, int]
    peak_phase: Phase
    peak_module: str
    host_pinned_bytes: int
    disk_peak_bytes: int

    @classmethod
    def of(
        cls, timeline: Timeline, allocated: Sequence[int], sizes: Sequence[int], peak_at: int | None
    ) -> TensorPeaks:
        """Return the peaks of a timeline.

        Args:
            timeline: the allocations.
            allocated: bytes on the device after each event.
            sizes: bytes that each allocation counts for.
            peak_at: position of the event that made the peak; None if there is no peak.
        """
        at_peak = None if peak_at is None else allocation_at(timeline, peak_at)
        return cls(
            allocated_peak_bytes=0 if peak_at is None else allocated[peak_at],
            by_category_at_peak={} if peak_at is None else categories_at(timeline, peak_at, sizes),
            by_phase=peak_by_phase(timeline, allocated),
            peak_phase="load" if at_peak is None else at_peak.phase,
            peak_module="" if at_peak is None else at_peak.module,
            host_pinned_bytes=max(timeline.live_bytes(("pinned",)), default=0),
            disk_peak_bytes=max(timeline.live_bytes(("disk",)), default=0),
        )


class Replays:
    """Replays of one trace, each made on first use.

    Args:
        trace: the trace to replay; not changed from here on.
        allocator: settings of the caching allocator.
        alike: replays of the same program whose trace differs at most in sizes on the device; its log of work and its
            tensors on the host are the same.
    """

    def __init__(self, trace: Trace, allocator: AllocatorConfig, alike: Replays | None = None) -> None:
        self.trace = trace
        self.allocator = allocator
        self._alike = alike
        self._peaks: dict[tuple[Place, ...], int] = {}

    @property
    def unlimited(self) -> Replay:
        """Replay by an allocator that gets all the memory it requests."""
        return self._without_limits[0]

    @property
    def reserved_peak_bytes(self) -> int:
        """Peak bytes that such an allocator holds in the long run."""
        return self._without_limits[1]

    @property
    def reserved_in_the_long_run(self) -> Sequence[int]:
        """Bytes that such an allocator holds after each event of the trace; from the last step on, in the long run."""
        return self._without_limits[2]

    @cached_property
    def _without_limits(self) -> tuple[Replay, int, Sequence[int]]:
        """Replay as traced, and the peak and the bytes in the long run, which differ only after the traced steps."""
        replaying = Replaying(self.trace.timeline, CachingAllocator(self.allocator))
        if self.settled is self.trace.timeline:
            replaying.run()
            counters = replaying.counters()
            return counters, counters.peak_reserved_bytes, counters.reserved_bytes
        first, last = self.trace.between_steps[-2:]
        replaying.run(until=last)
        peak, later = replaying.reserved_bytes_on(self.settled)
        replaying.run()
        counters = replaying.counters()
        in_the_long_run = counters.reserved_bytes[:first] + later[(NUM_REPETITIONS - 1) * (last - first) :]
        return counters, peak, in_the_long_run

    @cached_property
    def tensor_peaks(self) -> TensorPeaks:
        """Peaks of such an allocator's blocks, and their contents."""
        unlimited = self.unlimited
        return TensorPeaks.of(
            self.trace.timeline,
            unlimited.allocated_bytes,
            unlimited.block_bytes,
            unlimited.peak_allocated_at,
        )

    @cached_property
    def settled(self) -> Timeline:
        """The timeline with as many steps as the allocator needs until it requests no more memory."""
        return with_repeated_step(self.trace)

    @cached_property
    def clock(self) -> Clock:
        """The log of work, ready to be timed on a GPU."""
        return Clock(self.trace.work) if self._alike is None else self._alike.clock

    @cached_property
    def host_tensors(self) -> HostTensors:
        """Peaks of the tensors on the host."""
        return HostTensors.of(self.trace.timeline) if self._alike is None else self._alike.host_tensors

    def within(self, capacity_bytes: int, allowed_bytes: int | None) -> Replay:
        """Return the replay by an allocator with limits, in the long run; it depends on the GPU and is not cached."""
        allocator = CachingAllocator(
            self.allocator, capacity_bytes=capacity_bytes, allowed_bytes=allowed_bytes
        )
        return replay(self.settled, allocator)

    def peak_live_bytes(self, *places: Place) -> int:
        """Return the peak bytes of tensors alone in some places together."""
        if places not in self._peaks:
            self._peaks[places] = max(self.trace.timeline.live_bytes(places), default=0)
        return self._peaks[places]
