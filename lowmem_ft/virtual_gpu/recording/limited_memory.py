"""Device memory with an end: a request that does not fit raises torch's error while the program is traced.

Without it a traced program gets all that it requests, so that an estimate can tell what it would need.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple

import torch

from lowmem_ft.foundation.memory.allocator.block import Block
from lowmem_ft.foundation.memory.allocator.caching_allocator import CachingAllocator, OutOfMemory
from lowmem_ft.foundation.memory.timeline import Allocation
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.virtual_gpu.recording.recorder import Recorder


class FailedAt(NamedTuple):
    """The moment of a request that did not fit: the events of the timeline and the entries of work before it."""

    num_events: int
    num_entries: int


class LimitedMemory:
    """The memory of a recorder's device, given out by a caching allocator with a limit from now on.

    Args:
        recorder: the recorder of a machine that has not run anything.
        allocator: a fresh allocator with a limit.
        on_failure: called as a request fails, before the error is raised.
        on_next_request: called before the first request for device memory after it, when the program has gone on.

    Attributes:
        failures: the moments of the requests that failed.
    """

    def __init__(
        self,
        recorder: Recorder,
        allocator: CachingAllocator,
        on_failure: Callable[[], None],
        on_next_request: Callable[[], None],
    ) -> None:
        self.failures: list[FailedAt] = []
        self._recorder = recorder
        self._timeline = recorder.timeline
        self._allocator = allocator
        self._on_failure = on_failure
        self._on_next_request = on_next_request
        self._has_just_failed = False
        self._live: dict[int, Block] = {}
        self._position = 0
        recorder.on_request = self._take

    def _take(self, request: Allocation) -> None:
        """Take memory for an allocation that the timeline is about to get.

        Raises:
            torch.OutOfMemoryError: if it does not fit.
        """
        if request.place != "device":
            return
        if self._has_just_failed:
            self._has_just_failed = False
            self._on_next_request()
        block = self._malloc(request)
        if isinstance(block, str):
            gc.collect(
                1
            )  # of young cycles: a run's collector, which is paused here, would have found some by now
            block = self._malloc(request)
        if isinstance(block, str):
            self._has_just_failed = True
            self.failures.append(FailedAt(len(self._timeline.events), len(self._recorder.work.entries)))
            self._on_failure()
            raise torch.OutOfMemoryError(block)
        self._live[len(self._timeline.allocations)] = block

    def _malloc(self, request: Allocation) -> Block | str:
        """Return a block, or the error's words: an error of this module would hold its frames, and they it."""
        events = self._timeline.events
        for kind, index in events[self._position :]:
            if kind == "empty_cache":
                self._allocator.empty_cache()
            elif kind == "free" and index in self._live:
                self._allocator.free(self._live.pop(index))
        self._position = len(events)
        try:
            return self._allocator.malloc(request.size_bytes, request.stream)
        except OutOfMemory as error:
            return _words(error)


def _words(error: OutOfMemory) -> str:
    """Return the message as torch words it, by which programs and libraries recognise it.

    Source: pytorch 2.13, c10/cuda/CUDACachingAllocator.cpp, ``malloc``.
    """
    free = max(error.capacity_bytes - error.reserved_bytes, 0)
    unallocated = error.reserved_bytes - error.allocated_bytes
    return (
        f"CUDA out of memory. Tried to allocate {format_bytes(error.requested_bytes)}. GPU 0 has a total capacity of "
        f"{format_bytes(error.capacity_bytes)} of which {format_bytes(free)} is free. Of the allocated memory "
        f"{format_bytes(error.allocated_bytes)} is allocated by PyTorch, and {format_bytes(unallocated)} is reserved "
        "by PyTorch but unallocated."
    )
