"""Optimizer state kept in host memory, and updated on the device chunk by chunk."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lowmem_ft.foundation.devices import is_apart
from lowmem_ft.foundation.host.copy_engine import CopyEngine, CopyEvent
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.foundation.tensors.live_tensors import storage_key
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.techniques.technique import Technique

__all__ = ["enable_optimizer_offload"]

log = logging.getLogger(__name__)

NUM_SLOTS = 3
"""Slots in the ring: one chunk arrives, one is updated, one is copied back."""

_ALIGNMENT = 256
"""Alignment in bytes, that of CUDA's own allocations."""


class SupportsStateOffload(Protocol):
    """An optimizer whose state can be stored elsewhere, such as ``optimizers.ChunkedOptimizer``."""

    home: Any  # of the type optimizers.StateStorage, whose methods HostStorage has
    state: Any  # by parameter, then by name
    param_groups: list[dict[str, Any]]

    def kept_sizes(self, parameter: nn.Parameter) -> dict[str, tuple[int, torch.dtype]]:
        """Return what ``home`` stores for a parameter: by name, the number of elements and their type."""
        ...

    def chunk_size(self, device: torch.device) -> int:
        """Return the number of elements that are updated at a time on a device."""
        ...

    def allocate_state(self) -> None:
        """Allocate the state of every parameter that has none yet, in ``home``."""
        ...


def enable_optimizer_offload(optimizer: SupportsStateOffload, memory: HostMemory) -> _OptimizerOffload:
    """Keep the optimizer's state and master weights on the host, and update them on the device as before.

    Frees: all that the optimizer keeps in addition to the weights, except three chunks of it.
    Costs: it crosses the host link twice per step; both directions overlap with each other and with the update.
    Equals: the same weights and state bit for bit.
    Limits: on a CPU both sides are the same memory, so that nothing is freed there.
    Source: ZeRO-Offload: Democratizing Billion-Scale Model Training, 2021 (arXiv:2101.06840), which steps on the CPU;
    compact state crosses the link faster than a CPU updates fp32 state in its own memory.

    Args:
        optimizer: its existing state moves to the host, the rest is allocated there.
        memory: the host memory to keep it in.

    Returns:
        A handle whose ``remove()`` moves everything back to the weights' device.

    Raises:
        DoesNotFitError: if the host has too little memory left; nothing is allocated then.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sizes = [(parameter.numel(), optimizer.kept_sizes(parameter)) for parameter in parameters]
    num_bytes = sum(_bytes_of(kept) for _, kept in sizes)
    memory.check(
        num_bytes,
        "offload.optimizer=host",
        "Keep less (optimizer.state=8bit; with bfloat16 weights optimizer.master=split24), raise budget.host, or set "
        "offload.folder or offload.optimizer=device.",
        "optimizer_state",
    )
    chunk_size = optimizer.chunk_size(memory.device)
    visitors = [
        (count, kept | _waiting_weight(parameter, memory.device))
        for parameter, (count, kept) in zip(parameters, sizes, strict=True)
    ]
    slot_bytes = max(
        (_bytes_of(_part(kept, chunk_size / max(count, 1))) for count, kept in visitors), default=0
    )
    handle = _OptimizerOffload(optimizer, HostStorage(memory, slot_bytes))
    optimizer.allocate_state()
    log.info(
        "Optimizer state: %s in %s; %d chunks of at most %s are copied to the device in turn.",
        format_bytes(num_bytes),
        memory.place_of("optimizer_state"),
        NUM_SLOTS,
        format_bytes(slot_bytes),
    )
    return handle


class _OptimizerOffload(Technique):
    """Optimizer state on the host, until it is moved back.

    Args:
        optimizer: its ``home`` is replaced, and its state moved.
        home: the new storage.
    """

    def __init__(self, optimizer: SupportsStateOffload, home: HostStorage) -> None:
        super().__init__(partial(_move_state, optimizer, optimizer.home), home.synchronize)
        _move_state(optimizer, home)
        self._home = home

    def flush(self) -> None:
        """Block the host until all state is back in host memory, so that it may be read."""
        self._home.synchronize()


@dataclass
class Slot:
    """Device memory for one chunk at a time.

    Args:
        buffer: its bytes.
        free: when the last chunk has left it.
        places: cached views of the buffer, by types and lengths.
    """

    buffer: Tensor
    free: CopyEvent
    places: dict[tuple[tuple[torch.dtype, int], ...], list[Tensor]] = field(default_factory=dict)

    def places_for(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return flat views of the buffer, of the tensors' types and lengths: cached, as chunks come in few sizes."""
        layout = tuple((tensor.dtype, tensor.numel()) for tensor in tensors)
        if layout not in self.places:
            self.places[layout] = list(_carve(self.buffer, layout))
        return self.places[layout]


@dataclass(frozen=True)
class _Visitor:
    """A chunk on the device.

    Args:
        slot: the slot that holds it.
        home: its tensors in host memory.
        here: the same on the device.
        arrived: when they are there.
    """

    slot: Slot
    home: Mapping[str, Tensor]
    here: dict[str, Tensor]
    arrived: CopyEvent


@dataclass
class HostStorage:
    """State in host memory that is streamed through a ring of slots on the device.

    Args:
        memory: the host memory.
        slot_bytes: room for a chunk; a slot grows when a larger one comes.
    """

    memory: HostMemory
    slot_bytes: int = 0
    _engine: CopyEngine = field(init=False)
    _slots: deque[Slot] = field(init=False)
    _written: dict[int, CopyEvent] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._engine = CopyEngine(self.memory.device)
        self._slots = deque(Slot(self._bytes(self.slot_bytes), self._engine.now()) for _ in range(NUM_SLOTS))

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate zeros on the host."""
        return self.memory.allocate(num_elements, dtype, "optimizer_state")

    def visit(
        self, chunks: Iterable[Mapping[str, Tensor]], device: torch.device
    ) -> Iterator[dict[str, Tensor]]:
        """Yield each chunk's tensors on the device, while the next one is copied there and the last one back.

        Args:
            chunks: by name, views of tensors in host memory; no element is in two of them.
            device: the device to copy them to.

        Yields:
            The same names; in-place changes are copied back when the next chunk is requested.
        """
        assert device.type == self.memory.device.type, (device, self.memory.device)
        written: dict[int, CopyEvent] = {}
        visitors: deque[_Visitor] = deque()
        for chunk in chunks:
            visitors.append(self._fetch(chunk))
            if len(visitors) == NUM_SLOTS - 1:
                yield from self._receive(visitors.popleft(), written)
        for visitor in visitors:
            yield from self._receive(visitor, written)
        self._written.update(written)

    def written(self, tensor: Tensor) -> CopyEvent:
        """Return the end of the last copy back to a tensor's storage."""
        return self._written.get(storage_key(tensor), CopyEvent())

    def synchronize(self) -> None:
        """Block the host until all state is back in host memory, so that it may be read."""
        self._engine.synchronize()

    def _fetch(self, chunk: Mapping[str, Tensor]) -> _Visitor:
        """Start copying a chunk to the next slot."""
        # On a CPU, host and device tensors cannot be told apart: all count as on the host.
        waiting = {name: tensor for name, tensor in chunk.items() if tensor.device.type == "cpu"}
        if not waiting:
            return _Visitor(self._slots[0], {}, dict(chunk), CopyEvent())  # takes no slot, and delays nothing
        slot = self._next_slot(sum(_aligned(tensor.nbytes) for tensor in waiting.values()))
        # Chunks of one visit do not overlap; a visit before this one may have written the same ones.
        after = [slot.free, *(self.written(tensor) for tensor in waiting.values())]
        here, arrived = dict(chunk), CopyEvent()
        for name, place in zip(waiting, slot.places_for(waiting.values()), strict=True):
            arrived = self._engine.to_device(waiting[name], place, after=after)
            here[name], after = place, []
        return _Visitor(slot, waiting, here, arrived)

    def _receive(self, visitor: _Visitor, written: dict[int, CopyEvent]) -> Iterator[dict[str, Tensor]]:
        """Yield the chunk to be updated, then copy it back."""
        self._engine.wait(visitor.arrived)
        yield visitor.here
        updated = self._engine.now()
        for name, home in visitor.home.items():
            end = self._engine.to_host(visitor.here[name], home, after=(updated,), keep=False)
            visitor.slot.free = written[storage_key(home)] = end

    def _next_slot(self, num_bytes: int) -> Slot:
        slot = self._slots[0]
        self._slots.rotate(-1)
        if slot.buffer.nbytes < num_bytes:
            self._engine.wait(slot.free)  # before its memory is used for something else
            slot.buffer, slot.places, slot.free = self._bytes(num_bytes), {}, self._engine.now()
        return slot

    def _bytes(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.memory.device)


def _move_state(optimizer: SupportsStateOffload, home: Any) -> None:
    """Move the state that an optimizer keeps to another storage."""
    optimizer.home = home
    for parameter, state in optimizer.state.items():
        for name in optimizer.kept_sizes(parameter):
            place = home.allocate(state[name].numel(), state[name].dtype, parameter.device)
            state[name] = place.copy_(state[name])


def _waiting_weight(parameter: nn.Parameter, device: torch.device) -> dict[str, tuple[int, torch.dtype]]:
    """Return a weight that is on the host, too, as it is copied along with its state."""
    return {"weight": (parameter.numel(), parameter.dtype)} if is_apart(parameter, device) else {}


def _part(kept: Mapping[str, tuple[int, torch.dtype]], share: float) -> dict[str, tuple[int, torch.dtype]]:
    """Return what is kept for a chunk that is this share of its parameter; at most all of it."""
    return {name: (math.ceil(count * min(1.0, share)), dtype) for name, (count, dtype) in kept.items()}


def _bytes_of(kept: Mapping[str, tuple[int, torch.dtype]]) -> int:
    return sum(_aligned(count * dtype.itemsize) for count, dtype in kept.values())


def _carve(buffer: Tensor, layout: Iterable[tuple[torch.dtype, int]]) -> Iterator[Tensor]:
    start = 0
    for dtype, num_elements in layout:
        num_bytes = num_elements * dtype.itemsize
        yield buffer[start : start + num_bytes].view(dtype)
        start += _aligned(num_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
