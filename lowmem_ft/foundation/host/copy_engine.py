"""Copies between host memory and a device that overlap with compute: one stream each way, ordered by events.

Streams see each other's work only through events. ``Tensor.record_stream`` would do too, but it returns memory late,
at a moment that no one can predict.

Pageable memory, such as that of files, goes through pinned buffers, and the host works and waits meanwhile. So such a
copy is deferred until a caller waits for its end: the work that the program has queued on the device by then, a
layer's kernels, runs while the host reads what the next layer needs. No thread does it: a copy whose order depends only
on when it was requested and when it is waited for can be replayed, and its races can be found.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.foundation.devices import kernels_of
from lowmem_ft.foundation.units import MIB, format_bytes

logger = logging.getLogger(__name__)

SOURCES_KEPT = 2
"""Number of tensors on their way to the host whose device memory is held meanwhile."""

STAGING_BYTES = 16 * MIB
"""Size of each of the two pinned buffers through which pageable memory is copied, each way."""

_RESERVED_BUFFERS = 8
"""Number of buffers of two engines, as weights and optimizer state have one each."""


def reserve_staging_buffers() -> None:
    """Pin the buffers that copies of pageable memory will need, before a driver that pins little has nothing left.

    torch's allocator of pinned memory keeps buffers that are freed, and hands them out when an engine asks.
    """
    buffers: list[Tensor] = []
    with contextlib.suppress(_Refused):
        while len(buffers) < _RESERVED_BUFFERS:
            buffers.append(_pinned_buffer())


class _Refused(Exception):
    """The driver refuses to pin more; the message is the driver's."""


def _pinned_buffer() -> Tensor:
    try:
        return torch.empty(STAGING_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        raise _Refused(str(error).partition("\n")[0]) from error


class CopyEvent:
    """A point in a stream's work, such as the end of a copy; on a CPU, where calls block, it is always past."""

    __slots__ = ("_event",)

    def __init__(self, event: Any = None) -> None:
        self._event = event

    def hold(self, stream: Any) -> None:
        """Make a stream's further work wait for this point."""
        event = self._made()
        if event is not None:
            stream.wait_event(event)

    def synchronize(self) -> None:
        """Block the host until this point, so that it may read or reuse host memory."""
        event = self._made()
        if event is not None:
            event.synchronize()

    def _made(self) -> Any:
        return self._event


class PutOffCopy(CopyEvent):
    """The end of a deferred copy, which is made when a caller waits for it, or for one requested later.

    Args:
        make: makes the copy, and returns its end; None if the host has waited for it.
        queue: all deferred copies of the same engine, which this one joins: they are made in their order.
    """

    __slots__ = ("_make", "_queue")

    def __init__(self, make: Callable[[], Any], queue: deque[PutOffCopy]) -> None:
        super().__init__()
        self._make: Callable[[], Any] | None = make
        self._queue = queue
        queue.append(self)

    def make(self) -> None:
        """Make the copy, the first of the queue, now."""
        assert self._make is not None, "a tensor being made has left the queue"
        self._event = self._make()
        self._queue.popleft()
        self._make = None  # it may hold the last reference to a source

    def cancel(self) -> None:
        """Drop the copy without making it."""
        self._queue.remove(self)
        self._make = None

    def _made(self) -> Any:
        while self._make is not None:
            self._queue[0].make()
        return self._event


class CopyEngine:
    """Two streams next to the compute stream: one to the device, one to the host.

    A copy begins once the compute stream has done all work queued before, or after the events that the caller names
    instead; the compute stream waits for a copy only if the caller says so (:meth:`wait`).

    Host tensors may be pinned or not: pageable ones go through small pinned buffers when a caller first waits for the
    copy, or for a later one; the host then waits, because CUDA would not let it run ahead. Until then the host must
    change neither side. On a CPU each copy is done when the call returns.

    Args:
        device: the device.

    Attributes:
        is_asynchronous: whether a copy may still run when the call returns; false on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_asynchronous = kernels_of(device) == "cuda"
        self._leaving: deque[tuple[CopyEvent, Tensor]] = deque()
        self._put_off: deque[PutOffCopy] = deque()
        self._buffers: dict[tuple[str, int], tuple[Tensor, CopyEvent]] = {}
        self._was_refused = False
        if self.is_asynchronous:
            self._module: Any = torch.get_device_module(device)
            self._inward, self._outward = self._module.Stream(device), self._module.Stream(device)

    def now(self) -> CopyEvent:
        """Return the end of all work queued on the compute stream so far."""
        return CopyEvent(self._compute.record_event()) if self.is_asynchronous else CopyEvent()

    def wait(self, event: CopyEvent) -> None:
        """Make the compute stream's further work wait for an event."""
        if self.is_asynchronous:
            event.hold(self._compute)

    def to_device(
        self, host: Tensor, target: Tensor, *, after: Iterable[CopyEvent] | None = None
    ) -> CopyEvent:
        """Copy from the host to the device.

        Args:
            host: source; what fills it must be done (:meth:`CopyEvent.synchronize`) or be named in ``after``.
            target: on the device; the caller keeps it until the copy is done.
            after: events to wait for before ``target`` is written; None: all compute so far.

        Returns:
            The end of the copy. Wait for it before the target is used.
        """
        if not self.is_asynchronous:
            target.copy_(host)
            return CopyEvent()
        after = (self.now(),) if after is None else tuple(after)
        if not host.is_pinned():
            return PutOffCopy(partial(self._stage_in, _pieces(host, target), after), self._put_off)
        with self._on(self._inward, after):
            target.copy_(host, non_blocking=True)
            return CopyEvent(self._inward.record_event())

    def to_host(
        self, source: Tensor, host: Tensor, *, after: Iterable[CopyEvent] | None = None, keep: bool = True
    ) -> CopyEvent:
        """Copy from the device to the host.

        Args:
            source: on the device.
            host: target.
            after: events to wait for before ``source`` is read; None: all compute so far.
            keep: hold the source's memory until it may be reused: the two last sources stay held; before an older one
                is let go, the compute stream waits for its copy. False for a source that the caller keeps.

        Returns:
            The end of the copy. Synchronise with it before the host reads.
        """
        if not self.is_asynchronous:
            host.copy_(source)
            return CopyEvent()
        after = (self.now(),) if after is None else tuple(after)
        if host.is_pinned():
            with self._on(self._outward, after):
                host.copy_(source, non_blocking=True)
                end = CopyEvent(self._outward.record_event())
        else:
            end = PutOffCopy(partial(self._stage_out, _pieces(source, host), after), self._put_off)
        if keep:
            self._leaving.append((end, source))
            self._let_go(SOURCES_KEPT)
        return end

    def release_sources(self) -> None:
        """Let go of every source that is held: the compute stream's further work waits for their copies."""
        self._let_go(0)

    def forget_sources(self) -> None:
        """Let go of every source that is held; requires an idle device, so that none is or will be copied."""
        ends = [end for end, _ in self._leaving]
        for copy in [copy for copy in self._put_off if copy in ends]:
            copy.cancel()
        self._leaving.clear()

    def synchronize(self) -> None:
        """Block the host until every copy is done, and let go of all sources."""
        if self.is_asynchronous:
            while self._put_off:
                self._put_off[0].make()
            self._let_go(0)
            self._inward.synchronize()
            self._outward.synchronize()

    def _let_go(self, num_kept: int) -> None:
        while len(self._leaving) > num_kept:
            end, _ = self._leaving.popleft()
            # The allocator reuses memory in the order of the compute stream.
            end.hold(self._compute)

    @property
    def _compute(self) -> Any:
        return self._module.current_stream(self.device)

    @contextlib.contextmanager
    def _on(self, stream: Any, after: Iterable[CopyEvent]) -> Iterator[None]:
        for event in after:
            event.hold(stream)
        with self._module.stream(stream):
            yield

    # --- pageable memory: the host fills or empties one pinned buffer while the other one is being copied -------------

    def _stage_in(self, pieces: Sequence[tuple[Tensor, Tensor]], after: Iterable[CopyEvent]) -> Any:
        with self._on(self._inward, after):
            for index, (part, place) in enumerate(pieces):
                buffer = self._free_buffer("in", index % 2)[: len(part)]
                buffer.copy_(part)
                place.copy_(buffer, non_blocking=True)
                self._travels("in", index % 2, self._inward)
            return self._inward.record_event()

    def _stage_out(self, pieces: Sequence[tuple[Tensor, Tensor]], after: Iterable[CopyEvent]) -> None:
        """Copy piece by piece; returns no event, as the host has waited for every piece."""
        arrived: list[tuple[Tensor, Tensor, CopyEvent]] = []
        with self._on(self._outward, after):
            for index, (part, place) in enumerate(pieces):
                buffer = self._free_buffer("out", index % 2)[: len(part)]
                buffer.copy_(part, non_blocking=True)
                arrived.append((place, buffer, self._travels("out", index % 2, self._outward)))
                if len(arrived) == 2:
                    _unload(arrived.pop(0))
        for last in arrived:
            _unload(last)

    def _free_buffer(self, direction: str, number: int) -> Tensor:
        key = (direction, number)
        if key not in self._buffers:
            self._buffers[key] = self._new_buffer(), CopyEvent()
        buffer, travelled = self._buffers[key]
        travelled.synchronize()
        return buffer

    def _new_buffer(self) -> Tensor:
        """Return a buffer, pageable if the driver refuses: it then stages copies itself, and the host waits."""
        try:
            return _pinned_buffer()
        except _Refused as refusal:
            if not self._was_refused:
                logger.warning(
                    "Copies between host and device block the host, because the driver refused to pin a buffer of %s "
                    "for them: %s.",
                    format_bytes(STAGING_BYTES),
                    refusal,
                )
            self._was_refused = True
            return torch.empty(STAGING_BYTES, dtype=torch.uint8, device="cpu")

    def _travels(self, direction: str, number: int, stream: Any) -> CopyEvent:
        buffer, _ = self._buffers[direction, number]
        end = CopyEvent(stream.record_event())
        self._buffers[direction, number] = buffer, end
        return end


def _pieces(source: Tensor, target: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the bytes of two contiguous tensors, in pieces of a buffer's size.

    Views are made when a copy is requested: a trace records a tensor's use at that moment.
    """
    parts = (one.detach().view(-1).view(torch.uint8).split(STAGING_BYTES) for one in (source, target))
    return list(zip(*parts, strict=True))


def _unload(arrived: tuple[Tensor, Tensor, CopyEvent]) -> None:
    place, buffer, end = arrived
    end.synchronize()
    place.copy_(buffer)
