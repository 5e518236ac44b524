"""What is the same for a trace on every GPU, computed once: its replay without limits, and its log made ready."""

from __future__ import annotations

from functools import cached_property

from lowmem_ft.memory.allocator_config import AllocatorConfig
from lowmem_ft.memory.caching_allocator import CachingAllocator
from lowmem_ft.memory.category import Place
from lowmem_ft.memory.replay import Replay, replay
from lowmem_ft.memory.timeline import Timeline
from lowmem_ft.virtual_gpu.clock import Clock
from lowmem_ft.virtual_gpu.host_peak import HostTensors
from lowmem_ft.virtual_gpu.steady_state import with_repeated_step
from lowmem_ft.virtual_gpu.trace import Trace


class Replays:
    """Replays of one trace, each made when it is first asked for.

    Args:
        trace: what is replayed; not changed from here on.
        allocator: settings of the caching allocator.
    """

    def __init__(self, trace: Trace, allocator: AllocatorConfig) -> None:
        self.trace = trace
        self.allocator = allocator
        self._peaks: dict[tuple[Place, ...], int] = {}

    @cached_property
    def unlimited(self) -> Replay:
        """By an allocator that gets all it asks for."""
        return replay(self.trace.timeline, CachingAllocator(self.allocator))

    @cached_property
    def settled(self) -> Timeline:
        """The timeline with as many steps as the allocator needs to ask for no more."""
        return with_repeated_step(self.trace)

    @cached_property
    def reserved_peak_bytes(self) -> int:
        """The most that such an allocator holds in the long run."""
        return replay(self.settled, CachingAllocator(self.allocator)).peak_reserved_bytes

    @cached_property
    def clock(self) -> Clock:
        """The log of work, to be timed on a GPU."""
        return Clock(self.trace.work)

    @cached_property
    def host_tensors(self) -> HostTensors:
        """What waits beside the GPU."""
        return HostTensors.of(self.trace.timeline)

    def within(self, capacity_bytes: int, allowed_bytes: int | None) -> Replay:
        """By an allocator with limits, in the long run; this one depends on the GPU and is not kept."""
        allocator = CachingAllocator(
            self.allocator, capacity_bytes=capacity_bytes, allowed_bytes=allowed_bytes
        )
        return replay(self.settled, allocator)

    def peak_live_bytes(self, *places: Place) -> int:
        """The most that tensors alone take in some places together."""
        if places not in self._peaks:
            self._peaks[places] = max(self.trace.timeline.live_bytes(places), default=0)
        return self._peaks[places]
