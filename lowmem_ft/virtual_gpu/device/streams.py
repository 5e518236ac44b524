"""Streams and events of a virtual GPU: queues of work, each with a memory pool of its own; the clock times them."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.virtual_device import DEVICE_TYPE
from lowmem_ft.virtual_gpu.calls.active import active_gpu
from lowmem_ft.virtual_gpu.calls.device_index import device_index
from lowmem_ft.virtual_gpu.device.orderings import Orderings
from lowmem_ft.virtual_gpu.upstream.other_threads import refuse_in_other_threads


class VirtualEvent:
    """A point on a stream, as ``torch.cuda.Event``; the clock computes when it is reached."""

    _ids = itertools.count()

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.id = next(self._ids)
        self._enable_timing = enable_timing
        self._is_recorded = False

    def record(self, stream: VirtualStream | None = None) -> None:
        """Record the event after all work that the stream has so far."""
        self._is_recorded = True
        orderings_for("Event.record").record_event(self.id, None if stream is None else stream.id)

    def wait(self, stream: VirtualStream | None = None) -> None:
        """Let a stream's further work wait for the event."""
        orderings_for("Event.wait").wait_event(self.id, None if stream is None else stream.id)

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        orderings_for("Event.synchronize").synchronize_event(self.id)

    def query(self) -> bool:
        """Return True: a program that polls often enough sees the event reached."""
        orderings_for("Event.query").event_is_over(self.id)
        return True

    def elapsed_time(self, end: VirtualEvent) -> float:
        """Return the milliseconds between two events, which a trace does not know: 0.

        Raises:
            ValueError: if CUDA would not know them either (aten/src/ATen/cuda/CUDAEvent.h).
        """
        if not (self._enable_timing and end._enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self._is_recorded and end._is_recorded):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return 0.0


class VirtualStream:
    """A queue of work with a memory pool of its own, as ``torch.cuda.Stream``; stream 0 is the default one."""

    _ids = itertools.count(1)

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None) -> None:
        device_index(device)
        self.id = next(self._ids) if stream_id is None else stream_id
        self.device = torch.device(DEVICE_TYPE, 0)
        self.stream_id, self.device_index, self.device_type = self.id, 0, 1  # a number of torch's: CUDA

    def wait_event(self, event: VirtualEvent) -> None:
        """Let further work on this stream wait for the event."""
        event.wait(self)

    def wait_stream(self, stream: VirtualStream) -> None:
        """Let further work on this stream wait for all that another stream has so far."""
        event = VirtualEvent()
        event.record(stream)
        event.wait(self)

    def record_event(self, event: VirtualEvent | None = None) -> VirtualEvent:
        """Record an event after all work that this stream has so far."""
        event = event or VirtualEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for this stream."""
        orderings_for("Stream.synchronize").synchronize_stream(self.record_event().id)

    def query(self) -> bool:
        """Return True: a program that polls often enough sees all work done."""
        orderings_for("Stream.query").stream_is_idle(self.id)
        return True

    def is_capturing(self) -> bool:
        """Return False: a virtual GPU captures no graphs."""
        return False

    @property
    def cuda_stream(self) -> int:
        """The address of the stream, for a program's own kernels; a virtual stream has none."""
        raise UserError(
            "A stream of a virtual GPU has no address, asked for by `cuda_stream`. Leave out what launches kernels of "
            "its own, or give it an operator with a fake rule (torch.library)."
        )

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and the highest priority of streams."""
        return 0, -5

    def __enter__(self) -> VirtualStream:
        self._before = [*getattr(self, "_before", ()), current_stream()]
        set_stream(self)
        return self

    def __exit__(self, *exception: object) -> None:
        set_stream(self._before.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VirtualStream) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)


def orderings_for(what: str) -> Orderings:
    """Return the orderings of the active GPU, for a call in the thread that the trace follows."""
    refuse_in_other_threads(what)
    return active_gpu().recorder.orderings


def current_stream() -> VirtualStream:
    """Return the stream that work and memory go to."""
    return VirtualStream(stream_id=active_gpu().recorder.stream)


def set_stream(stream: VirtualStream) -> None:
    """Send further work and memory to a stream."""
    refuse_in_other_threads("set_stream")
    active_gpu().recorder.stream = stream.id


class VirtualStreamContext:
    """``torch.cuda.StreamContext``: sends the work of a block to a stream; None leaves the current one."""

    def __init__(self, stream: VirtualStream | None) -> None:
        self._stream = stream
        self._before: VirtualStream | None = None

    def __enter__(self) -> None:
        self._before = current_stream()
        set_stream(self._stream or self._before)

    def __exit__(self, *exception: object) -> None:
        assert self._before is not None
        set_stream(self._before)


def number_anew() -> None:
    """Number new streams and events from the start, so that two traces of one program are equal."""
    VirtualStream._ids = itertools.count(1)
    VirtualEvent._ids = itertools.count()
