"""Checks every operator of a program on a virtual GPU against the order that its streams and events establish.

CUDA treats copies between the host and the device as follows:

- to or from pinned memory with ``non_blocking=True``, the stream reads and writes both sides, and the host continues;
- from pageable memory, the host has read it when the call returns;
- to pageable memory, and without ``non_blocking``, the host waits for the stream;
- ``.to("cpu", non_blocking=True)`` makes pinned memory and does not wait.

Source: pytorch, aten/src/ATen/native/cuda/Copy.cu and native/TensorConversions.cpp; CUDA's "API synchronization
behavior".
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowmem_ft.foundation.memory.category import Place
from lowmem_ft.foundation.memory.race import MemoryUse, Race
from lowmem_ft.foundation.packages import own_folder
from lowmem_ft.foundation.tensors.backward_detection import is_in_backward
from lowmem_ft.virtual_gpu.races.happens_before import Access, Conflict, Span
from lowmem_ft.virtual_gpu.races.operands import operands, span_of, uses_of
from lowmem_ft.virtual_gpu.races.stream_order import StreamOrder
from lowmem_ft.virtual_gpu.values.questions import is_of_library, shown_line

if TYPE_CHECKING:
    from lowmem_ft.virtual_gpu.recording.recorder import Recorder

_PASSED_OVER = (
    *map(own_folder, ("lowmem_ft.virtual_gpu", "lowmem_ft.foundation.upstream")),
    torch.__file__.removesuffix("__init__.py"),
    "<frozen",
)
_WRAPPERS = ("contextlib.py", "functools.py", "weakref.py")

Line = tuple[CodeType, int]


@dataclass(frozen=True, slots=True)
class Call:
    """An operator that was called.

    Args:
        name: the operator's name.
        stream: the stream on which it runs; None: the host.
        lines: lines of code that led to it, as in :attr:`MemoryUse.places`.
        gives_back: whether the memory must not be used any more.
    """

    name: str
    stream: int | None
    lines: tuple[Line, ...]
    gives_back: bool = False


@dataclass(slots=True)
class _Operand:
    index: int
    place: Place
    span: Span
    writes: bool


class StreamChecker:
    """Finds races, from all calls and allocations that the recorder of a virtual GPU reports.

    Args:
        recorder: the recorder that numbers the streams and allocations.

    Attributes:
        order: the order of streams and events, which finds conflicts.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.order = StreamOrder()
        self._recorder = recorder
        self._registered: set[int] = set()
        self._stream_of_node: dict[int, int] = {}
        self._last_sequence = 0

    def races(self) -> tuple[Race, ...]:
        """Return the races found so far, each pair of calls once."""
        found: dict[tuple[Any, ...], Race] = {}
        for conflict in self.order.conflicts:
            first, second = conflict.first, conflict.second
            key = (first.what, first.writes, second.what, second.writes)
            if key not in found:
                found[key] = self._race(conflict)
        return tuple(found.values())

    def allocated(self, index: int) -> None:
        """Note that the recorder has begun an allocation."""
        allocation = self._recorder.timeline.allocations[index]
        on_device = allocation.place == "device"
        self.order.allocated(index, allocation.size_bytes, allocation.stream if on_device else None)

    def freed(self, index: int) -> None:
        """Note that the recorder has ended an allocation; torch's allocators wait for copies, and no others do."""
        if index in self._registered:
            self.gives_back(index, "free")
        self.order.freed(index)

    def registered(self, index: int) -> None:
        """Note that the program has pinned host memory of its own."""
        self._registered.add(index)

    def gives_back(self, index: int, how: str) -> None:
        """Note that such memory is unregistered or freed, when no copy may be in flight."""
        self._registered.discard(index)
        self._host_writes(index, Call(how, None, _lines(), gives_back=True))

    def host_may_use(self, tensor: Tensor) -> None:
        """Note that the host gets a tensor in host memory to read and write."""
        index = self._recorder.index_of(tensor)
        if index is not None:
            self._host_writes(index, Call("use", None, _lines()))

    def _host_writes(self, index: int, call: Call) -> None:
        span = Span(0, self._recorder.timeline.allocations[index].size_bytes)
        self.order.access(index, None, span, writes=True, what=call)

    def buffer(self, index: int) -> None:
        """Note a kernel's own buffer, which the kernel fills."""
        allocation = self._recorder.timeline.allocations[index]
        if allocation.place == "device" and allocation.size_bytes:
            call = Call("a kernel's own buffer", self._recorder.stream, _lines())
            span = Span(0, allocation.size_bytes)
            self.order.access(index, self._recorder.stream, span, writes=True, what=call)

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note a call of an operator."""
        stream = self._recorder.stream
        node = self._follow_autograd(stream)
        uses = uses_of(func)
        if not uses.touches:
            return
        touched = list(self._touched(uses, args, kwargs, result))
        is_on_device = any(operand.place == "device" for operand in touched)
        name = f"{func._opname} of {node}" if node else func._opname
        lines = _lines()
        if uses.is_copy and is_on_device and any(operand.place != "device" for operand in touched):
            self._copy(touched, func, args, kwargs, Call(name, stream, lines))
            return
        for operand in touched:
            # The host itself reads numbers that it passes to a kernel; kernels read CUDA's managed memory in place.
            is_of_host = not is_on_device or operand.place not in ("device", "managed")
            agent = None if is_of_host else stream
            call = Call(name, agent, lines)
            self.order.access(operand.index, agent, operand.span, writes=operand.writes, what=call)
        if uses.waits and is_on_device:
            self.order.wait_stream(stream, None)

    def host_reads(self, tensor: Tensor) -> None:
        """Let the host read a tensor's values, for which it waits for the stream if they are on the device."""
        span, index = span_of(tensor), self._recorder.index_of(tensor)
        stream = self._recorder.stream
        is_on_device = index is None or self._recorder.timeline.allocations[index].place == "device"
        if index is not None and span is not None:
            agent = stream if is_on_device else None
            self.order.access(index, agent, span, writes=False, what=Call("reading", agent, _lines()))
        if is_on_device:
            self.order.wait_stream(stream, None)

    def _copy(
        self, touched: list[_Operand], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call
    ) -> None:
        stream = self._recorder.stream
        does_not_wait = bool(kwargs.get("non_blocking", len(args) > 2 and args[2]))
        waits = not does_not_wait
        for operand in touched:
            by_host = False
            if operand.place != "device":
                is_pinned = operand.place in ("pinned", "managed")
                by_host = not is_pinned and not operand.writes
                waits |= not is_pinned and operand.writes
            agent = None if by_host else stream
            what = Call(call.name, agent, call.lines)
            self.order.access(operand.index, agent, operand.span, writes=operand.writes, what=what)
        if waits:
            self.order.wait_stream(stream, None)

    def _touched(
        self, uses: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Iterator[_Operand]:
        recorder, allocations = self._recorder, self._recorder.timeline.allocations
        seen: set[int] = set()
        for tensor, writes, is_result in operands(uses, args, kwargs, result):
            index = recorder.index_of(tensor)
            if index is None or (is_result and index in seen):
                continue
            seen.add(index)
            span = span_of(tensor)
            if span is not None:
                yield _Operand(index, allocations[index].place, span, writes)

    def _follow_autograd(self, stream: int) -> str:
        """Return the node whose backward runs; autograd lets it wait for the stream that its forward ran on."""
        now = torch.autograd._get_sequence_nr()
        if stream:
            self._stream_of_node.update(dict.fromkeys(range(self._last_sequence, now), stream))
        self._last_sequence = now
        if not is_in_backward():
            return ""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ""
        its_stream = self._stream_of_node.get(node._sequence_nr(), 0) if self._stream_of_node else stream
        if its_stream != stream:
            self.order.wait_stream(its_stream, stream)
        return node.name()

    def _race(self, conflict: Conflict) -> Race:
        allocation = self._recorder.timeline.allocations[conflict.memory.index]
        return Race(
            first=_use_of(conflict.first),
            second=_use_of(conflict.second),
            is_reuse=conflict.first in conflict.memory.before.values(),
            size_bytes=allocation.size_bytes,
            place=allocation.place,
            category=allocation.category,
            module=allocation.module,
        )


def _use_of(access: Access) -> MemoryUse:
    call: Any = access.what
    places = tuple(f"{shown_line(code.co_filename, number)} in {code.co_name}" for code, number in call.lines)
    return MemoryUse(
        operator=call.name,
        writes=access.writes,
        stream=call.stream,
        places=places,
        gives_back=call.gives_back,
    )


@functools.cache
def _is_passed_over(file: str) -> bool:
    return file.startswith(_PASSED_OVER) or file.endswith(_WRAPPERS)


def _lines() -> tuple[Line, ...]:
    """Return the innermost line outside torch and this package, one of another file, the first outside libraries."""
    frame: FrameType | None = sys._getframe(2)
    lines: list[Line] = []
    file = ""
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        if name != file and not _is_passed_over(name):
            is_own = not is_of_library(name)
            if len(lines) < 2 or is_own:
                lines.append((code, frame.f_lineno))
                file = name
            if is_own:
                break
        frame = frame.f_back
    return tuple(lines)
