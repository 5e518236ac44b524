"""What waits for what on a virtual GPU: events, streams and the host, told to the log, and to who looks for races."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from lowmem_ft.virtual_gpu.recorder import Recorder


class Orderings:
    """Takes the orderings of a program.

    Args:
        recorder: of the machine; a stream of None is its current one.
    """

    def __init__(self, recorder: Recorder) -> None:
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

    def host_reads(self, tensor: Tensor) -> None:
        """The host asks for a tensor's values, and waits for those that are on the device."""
        recorder = self._recorder
        self._log.synchronize(waits=tensor.device.type == recorder.device_type)
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
