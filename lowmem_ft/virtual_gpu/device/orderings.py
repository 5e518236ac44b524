"""Waits between events, streams and the host of a virtual GPU, passed to the work log and to the race checker."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch import Tensor

from lowmem_ft.virtual_gpu.upstream.other_threads import refuse_in_other_threads
from lowmem_ft.virtual_gpu.values.questions import asking_frames

if TYPE_CHECKING:
    from lowmem_ft.virtual_gpu.recording.recorder import Recorder


class Orderings:
    """Receives a program's waits and events.

    Args:
        recorder: the machine's recorder; a stream of None is its current one.

    Attributes:
        sync_debug_mode: the mode set by ``torch.cuda.set_sync_debug_mode``: 1 warns where the host waits, 2 raises.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.sync_debug_mode = 0
        self._recorder = recorder
        self._log = recorder.work
        self._checked = None if recorder.checker is None else recorder.checker.order
        self._both = (self._log,) if self._checked is None else (self._log, self._checked)

    def record_event(self, event: int, stream: int | None) -> None:
        """Record an event after the work that a stream has so far."""
        stream = self._begin(stream)
        for follower in self._both:
            follower.record_event(event, stream)

    def wait_event(self, event: int, stream: int | None) -> None:
        """Let a stream's further work wait for an event."""
        stream = self._begin(stream)
        for follower in self._both:
            follower.wait_event(event, stream)

    def synchronize_event(self, event: int) -> None:
        """Let the host wait for an event."""
        self._begin(None)
        self._log.synchronize_event(event)
        if self._checked is not None:
            self._checked.wait_event(event, None)

    def event_is_over(self, event: int) -> None:
        """Note that the host has queried an event and found it reached."""
        if self._checked is not None:
            self._checked.wait_event(event, None)

    def stream_is_idle(self, stream: int) -> None:
        """Note that the host has queried a stream and found its work done."""
        if self._checked is not None:
            self._checked.wait_stream(stream, None)

    def synchronize(self) -> None:
        """Let the host wait for all streams."""
        for follower in self._both:
            follower.synchronize()

    def synchronize_stream(self, event: int) -> None:
        """Let the host wait for a stream, by an event after its work."""
        self.host_is_held_up()
        self.synchronize_event(event)

    def host_is_held_up(self) -> None:
        """Warn or raise where CUDA does in its sync debug mode: not for events, nor for all streams together.

        Source: ``warn_or_error_on_sync``, in c10/cuda/CUDAFunctions.cpp, and its callers there.

        Raises:
            RuntimeError: in mode 2.
        """
        if not self.sync_debug_mode:
            return
        message = "called a synchronizing CUDA operation"
        if self.sync_debug_mode == 2:
            raise RuntimeError(message)
        frame = next(asking_frames())
        registry = frame.f_globals.setdefault("__warningregistry__", {})
        warnings.warn_explicit(
            message, UserWarning, frame.f_code.co_filename, frame.f_lineno, registry=registry
        )

    def host_reads(self, tensor: Tensor) -> None:
        """Let the host read a tensor's values, for which it waits if they are on the device."""
        refuse_in_other_threads("a reading of values")
        recorder = self._recorder
        waits = tensor.device.type == recorder.device_type
        if waits:
            self.host_is_held_up()
        self._log.synchronize(waits=waits)
        if recorder.checker is not None:
            recorder.checker.host_reads(tensor)

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """Note a ``Tensor.record_stream``: memory still frees at once, but its reuse does not race with that stream."""
        index = self._recorder.index_of(tensor)
        if self._checked is not None and index is not None:
            self._checked.record_stream(index, stream)

    def _begin(self, stream: int | None) -> int:
        self._recorder.alike.operator_begins()
        return self._recorder.stream if stream is None else stream
