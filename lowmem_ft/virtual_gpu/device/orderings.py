"""What waits for what on a virtual GPU: events, streams and the host, told to the log, and to who looks for races."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch import Tensor

from lowmem_ft.virtual_gpu.upstream.other_threads import refuse_in_other_threads
from lowmem_ft.virtual_gpu.values.questions import asking_frames

if TYPE_CHECKING:
    from lowmem_ft.virtual_gpu.recording.recorder import Recorder


class Orderings:
    """Takes the orderings of a program.

    Args:
        recorder: of the machine; a stream of None is its current one.

    Attributes:
        sync_debug_mode: what ``torch.cuda.set_sync_debug_mode`` has set: 1 warns where the host waits, 2 raises.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.sync_debug_mode = 0
        self._recorder = recorder
        self._log = recorder.work
        self._checked = None if recorder.checker is None else recorder.checker.order

    def record_event(self, event: int, stream: int | None) -> None:
        """An event behind the work that a stream has so far."""
        stream = self._begin(stream)
        self._log.record_event(event, stream)
        if self._checked is not None:
            self._checked.record_event(event, stream)

    def wait_event(self, event: int, stream: int | None) -> None:
        """A stream's further work comes after an event."""
        stream = self._begin(stream)
        self._log.wait_event(event, stream)
        if self._checked is not None:
            self._checked.wait_event(event, stream)

    def synchronize_event(self, event: int) -> None:
        """The host waits for an event."""
        self._begin(None)
        self._log.synchronize_event(event)
        if self._checked is not None:
            self._checked.wait_event(event, None)

    def event_is_over(self, event: int) -> None:
        """The host has asked whether an event is reached, and it is."""
        if self._checked is not None:
            self._checked.wait_event(event, None)

    def stream_is_idle(self, stream: int) -> None:
        """The same of all that a stream has been given."""
        if self._checked is not None:
            self._checked.wait_stream(stream, None)

    def synchronize(self) -> None:
        """The host waits for all streams."""
        self._log.synchronize()
        if self._checked is not None:
            self._checked.synchronize()

    def synchronize_stream(self, event: int) -> None:
        """The host waits for a stream, by an event behind its work."""
        self.host_is_held_up()
        self.synchronize_event(event)

    def host_is_held_up(self) -> None:
        """Warn or raise where CUDA does in its debug mode: not for events, nor for all streams together.

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
        """The host asks for a tensor's values, and waits for those that are on the device."""
        refuse_in_other_threads("a reading of values")
        recorder = self._recorder
        waits = tensor.device.type == recorder.device_type
        if waits:
            self.host_is_held_up()
        self._log.synchronize(waits=waits)
        if recorder.checker is not None:
            recorder.checker.host_reads(tensor)

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """``Tensor.record_stream``; memory is free at once all the same, but using it again is no race with that."""
        index = self._recorder.index_of(tensor)
        if self._checked is not None and index is not None:
            self._checked.record_stream(index, stream)

    def _begin(self, stream: int | None) -> int:
        self._recorder.alike.operator_begins()
        return self._recorder.stream if stream is None else stream
