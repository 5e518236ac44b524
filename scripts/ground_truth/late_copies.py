"""A stand-in for a CUDA device in this machine's own memory, whose copies come as late as their events allow.

On a CPU every copy is done when the call returns, so a missing wait changes no number. :func:`late_copies` gives
``CopyEngine`` and its callers, unchanged, a device module with streams, events and pinned memory ordered as CUDA's are:

- *late*: a copy runs when an agent waits for an event behind it, and not before; *random*: some time before that. Code
  that read or wrote too early gets other numbers then. Copies hold their tensors weakly, as CUDA's do.
- Compute runs at once, preceded by the copies that its stream was to wait for, so numbers do not show what should have
  waited for *it*. Therefore every operator's reads and writes of memory are also checked against the order that events
  make (``virtual_gpu/races``), which finds each missing one in a single run, whatever came first.

Host memory is what :class:`HostMemory` hands out and what is allocated pinned; all other tensors count as the device's.
A number that the host requests from the device (``item``) orders nothing here: no copy may rely on such a read.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType, SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
from ground_truth.late_streams import HostRanges, Stream
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lowmem_ft.host import copy_engine, pinned_memory, side_stream
from lowmem_ft.host.pinned_memory import HostMemory
from lowmem_ft.optimizers import chunked_optimizer
from lowmem_ft.techniques.offload import optimizer_offload
from lowmem_ft.virtual_gpu.races.happens_before import COMPUTE, HOST, HappensBefore, Memory, Span

aten = torch.ops.aten

When = Literal["at once", "late", "random"]
"""The time of a copy; races are found in each mode."""

DEVICE = torch.device("cpu")

_module_of = torch.get_device_module
_READS_NOTHING = (
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "new_zeros",
    "zeros_like",
    "ones_like",
    "full_like",
)


@dataclass(eq=False, kw_only=True)
class _DeviceMemory(Memory):
    """Memory of a device: whose, and whether what frees it is checked."""

    device: LateDevice
    is_watched: bool = False


@contextlib.contextmanager
def late_copies(when: When, *, pins: bool = True, seed: int = 0) -> Iterator[LateDevice]:
    """Let a CPU stand in for a device with copies of its own, in a ``with`` block.

    Args:
        when: when copies are made.
        pins: whether the driver pins memory; if not, all is pageable and goes through staging buffers.
        seed: seed of the random moments.

    Yields:
        The device. Its ``races`` are complete after ``synchronize``.
    """
    device = LateDevice(when, pins=pins, seed=seed)
    with device.standing_in():
        yield device


def _stands_for_cuda(device: torch.device) -> str:
    _check(device)
    return "cuda"


def _check(device: torch.device) -> None:
    if torch.device(device) != DEVICE:
        raise RuntimeError(f"This device is {DEVICE}, got {device}")


class LateDevice(TorchDispatchMode):
    """The device module, and the mode that sees every operator; see :func:`late_copies`.

    Attributes:
        order: judges what is ordered.
        host: the ranges of host memory.
        num_copies: number of copies on a stream of their own.
    """

    def __init__(self, when: When, *, pins: bool = True, seed: int = 0) -> None:
        super().__init__()
        self.order = HappensBefore()
        self.host = HostRanges()
        self.num_copies = 0
        self._when, self._pins = when, pins
        self._random = random.Random(seed)
        self._compute = self._current = Stream(self.order, COMPUTE)
        self._streams: list[Stream] = []
        self._lost: list[str] = []

    @property
    def races(self) -> list[str]:
        """Accesses that nothing orders, each once."""
        return list(dict.fromkeys([*map(str, self.order.conflicts), *self._lost]))

    def forget(self) -> None:
        """Start afresh: finish all work, and drop all findings."""
        self.synchronize(DEVICE)
        self.order.conflicts.clear()
        self._lost.clear()

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Act as the device, in a ``with`` block; objects built in one block can be used in another."""
        allocate = HostMemory.allocate

        def allocate_on_host(memory: HostMemory, *args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(memory, *args, **kwargs)
            self.host.add(tensor)
            return tensor

        with (
            mock.patch.object(torch, "get_device_module", self.module_of),
            mock.patch.object(copy_engine, "kernels_of", _stands_for_cuda),
            mock.patch.object(pinned_memory, "kernels_of", _stands_for_cuda),
            mock.patch.object(side_stream, "kernels_of", _stands_for_cuda),
            mock.patch.object(chunked_optimizer, "is_apart", self.is_apart),
            mock.patch.object(optimizer_offload, "is_apart", self.is_apart),
            mock.patch.object(HostMemory, "allocate", allocate_on_host),
            self,
        ):
            try:
                yield
            finally:
                self.synchronize(DEVICE)

    def is_apart(self, tensor: Tensor, device: torch.device) -> bool:
        """Replace :func:`lowmem_ft.foundation.devices.is_apart`."""
        _check(device)
        return self.host.find(tensor.data_ptr()) is not None

    # --- the device's module, as torch.cuda is --------------------------------------------------------------------

    def module_of(self, device: torch.device | str | None = None) -> Any:
        """Replace ``torch.get_device_module``."""
        return self if device is not None and torch.device(device) == DEVICE else _module_of(device)

    def Stream(self, device: torch.device) -> Stream:
        """See ``torch.cuda``."""
        _check(device)
        stream = Stream(self.order, self.order.new_agent())
        self._streams.append(stream)
        return stream

    def current_stream(self, device: torch.device) -> Stream:
        """See ``torch.cuda``."""
        _check(device)
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """See ``torch.cuda``."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def synchronize(self, device: torch.device) -> None:
        """See ``torch.cuda``."""
        _check(device)
        for stream in (self._compute, *self._streams):
            stream.synchronize()

    def cudart(self) -> Any:
        """Return the driver's part: pinning."""

        def register(pointer: int, num_bytes: int, flags: int) -> int:
            if self._pins:
                self.host.add_range(pointer, num_bytes, is_pinned=True)
            return 0 if self._pins else 2

        def unregister(pointer: int) -> int:
            found = self.host.find(pointer)
            assert found is not None, "nothing is registered there"
            self._freed(found[1].memory, HOST)
            self.host.remove(pointer)
            return 0

        return SimpleNamespace(
            cudaHostRegister=register,
            cudaHostUnregister=unregister,
            cudaGetErrorString=lambda result: f"error {result}",
        )

    # --- operators ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.is_pinned.default:
            found = self.host.find(args[0].data_ptr())
            return found is not None and found[1].is_pinned
        if func is aten.empty.memory_format and kwargs.get("pin_memory"):
            tensor = func(*args, **(kwargs | {"pin_memory": False}))
            self.host.add(tensor, is_pinned=True)
            return tensor
        if func is aten.copy_.default:
            return self._copy(*args, **kwargs)
        if not func.is_view:
            self._current.catch_up()
            self._touch_arguments(func, args, kwargs)
        result = func(*args, **kwargs)
        if not func.is_view:
            self._touch_results(func, result)
        return result

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        on_host = [self.host.find(tensor.data_ptr()) for tensor in (target, source)]
        stream = self._current
        num_on_host = sum(found is not None for found in on_host)
        agent = HOST if num_on_host == 2 else stream.agent
        what = f"{'a copy on the host' if agent == HOST else 'a copy'} {_place()}"
        self._touch(source, agent, writes=False, what=what)
        self._touch(target, agent, writes=True, what=what)
        if agent in (HOST, COMPUTE) or not num_on_host:
            if agent != HOST:
                stream.catch_up()
            target = aten.copy_.default(target, source)
        else:
            self.num_copies += 1
            stream.give(self._later(self._handle(target), self._handle(source), what))
            if self._when == "at once":
                stream.catch_up()
            elif self._when == "random":
                self._run_some()
        if num_on_host == 1 and not (
            non_blocking and all(found is None or found[1].is_pinned for found in on_host)
        ):
            stream.synchronize()
        return target

    def _later(
        self, target_of: Callable[[], Tensor | None], source_of: Callable[[], Tensor | None], what: str
    ) -> Callable[[], None]:
        def copy() -> None:
            with _disable_current_modes(), torch.no_grad():
                target, source = target_of(), source_of()
                if target is None or source is None:
                    self._lost.append(f"memory is freed before {what} is made")
                else:
                    target.copy_(source)

        return copy

    def _handle(self, tensor: Tensor) -> Callable[[], Tensor | None]:
        """Return a function that finds a tensor again if its memory still exists, without holding the memory."""
        dtype, shape, stride, offset = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        found = self.host.find(tensor.data_ptr())
        if found is None:
            storage_of = weakref.ref(tensor.untyped_storage())

            def on_device() -> Tensor | None:
                storage: Any = storage_of()
                return (
                    None
                    if storage is None
                    else torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
                )

            return on_device
        address, num_bytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        assert tensor.is_contiguous(), "host memory is copied as it lies"

        def on_host() -> Tensor | None:
            """Find by address: pinned pages exist until the driver lets them go, which is after their storage."""
            if self.host.find(address) != found:
                return None
            return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=dtype).view(
                shape
            )

        return on_host

    def _run_some(self) -> None:
        for stream in self._streams:
            if self._random.random() < 0.3:
                stream.run(self._random.randint(stream.num_done, len(stream.waiting)))

    def _touch_arguments(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        writes = _written_arguments(func)
        reads_nothing = func._opname in _READS_NOTHING
        for number, argument in (*enumerate(args), *kwargs.items()):
            is_written = number in writes
            if reads_nothing and not is_written:
                continue
            for tensor in argument if isinstance(argument, (list, tuple)) else (argument,):
                if isinstance(tensor, Tensor):
                    self._touch_where_it_is(tensor, writes=is_written, what=func._opname)

    def _touch_results(self, func: Any, result: Any) -> None:
        """Record new memory: freed before in the order of the current stream, to whose pool it returns."""
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, Tensor) and self._memory_of(tensor.untyped_storage()) is None:
                storage: Any = tensor.untyped_storage()
                storage.pool = self._current.agent
                self._touch_where_it_is(tensor, writes=True, what=func._opname)

    def _touch_where_it_is(self, tensor: Tensor, *, writes: bool, what: str) -> None:
        is_on_host = self.host.find(tensor.data_ptr()) is not None
        self._touch(tensor, HOST if is_on_host else self._current.agent, writes=writes, what=what)

    def _touch(self, tensor: Tensor, agent: int, *, writes: bool, what: str) -> None:
        address = tensor.data_ptr()
        if not address or not tensor.numel():
            return
        found = self.host.find(address)
        if found is not None:
            start, memory = address - found[0], found[1].memory
        else:
            storage: Any = tensor.untyped_storage()
            start, memory = address - storage.data_ptr(), self._memory_of(storage)
            if memory is None:
                memory = storage.memory = _DeviceMemory(device=self)
            if agent != COMPUTE and not memory.is_watched:
                memory.is_watched = True
                pool = getattr(storage, "pool", COMPUTE)
                weakref.finalize(storage, self._freed, memory, pool).atexit = False
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        span = Span(start, start + (extent + 1) * tensor.element_size())
        self.order.access(agent, memory, span, writes=writes, what=what)

    def _memory_of(self, storage: Any) -> _DeviceMemory | None:
        memory = getattr(storage, "memory", None)
        return memory if memory is not None and memory.device is self else None

    def _freed(self, memory: Memory, agent: int) -> None:
        """Free memory: the device's goes to its allocator, which reuses it in the order of the agent's stream."""
        clock = self.order.clock(agent)
        self._lost += [
            f"memory is freed while it is in use by {use.what}"
            for use in memory.accesses
            if clock.get(use.agent, 0) < use.epoch and use.agent != agent
        ]


_WRITTEN: dict[Any, frozenset[int | str]] = {}


def _written_arguments(func: Any) -> frozenset[int | str]:
    """Return positions and names of the arguments that an operator writes to."""
    if func not in _WRITTEN:
        arguments = func._schema.arguments
        written = [
            (i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write
        ]
        _WRITTEN[func] = frozenset(key for pair in written for key in pair)
    return _WRITTEN[func]


def _place() -> str:
    """Return the line of the package that a copy comes from, preferring callers of the engine to the engine."""
    frame: FrameType | None = sys._getframe(2)
    lines: list[str] = []
    while frame is not None and len(lines) < 4:
        file = frame.f_code.co_filename
        if "/lowmem_ft/" in file:
            lines.append(f"{file.rpartition('/')[2]}:{frame.f_lineno}")
        frame = frame.f_back
    outside = [line for line in lines if not line.startswith("copy_engine.py")]
    return f"at {(outside or lines or ['?'])[0]}"
