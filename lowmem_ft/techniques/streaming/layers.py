"""Decoder layers whose weights are kept in host memory and streamed through two slots on the device.

Layer i always uses slot ``i % 2``. While it computes, the next layer's weights are copied to the other slot; the last
layers' weights at the end of forward, and the first layers' at the end of backward, are still there when they are
needed again. Deferred updates for the next layer's visit in forward are made in its slot meanwhile, too.

More slots or copies in pieces do not pay: by the clock of virtual GPUs (Llama 3.1 8B, 1 to 16 rows of 2048 tokens a
step, A100, H100 and RTX 4090, 2026-11-23) a third slot, with each layer prefetched two ahead, saves at most 0.6% of a
step for a layer's memory, and pieces of 32 MiB save nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from lowmem_ft.foundation.devices import is_virtual
from lowmem_ft.foundation.host.copy_engine import CopyEngine, CopyEvent
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.techniques.streaming.tensors import StreamedTensor, streamed_tensors, with_own_storage

ALIGNMENT = 256
"""Alignment in bytes of each tensor, as the vector loads of kernels need it."""

NUM_SLOTS = 2


class SupportsDeferredUpdates(Protocol):
    """An updater of weights as streaming needs it: see ``optimizer_in_backward.InBackward``."""

    updates_at_once: bool
    """True if weights are updated while their gradients are computed, False if :meth:`apply` updates them."""

    def defer(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave the updates of these parameters to :meth:`apply` if they cannot be made at once."""
        ...

    def has_deferred(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether the update of any of them is deferred."""
        ...

    def apply(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make the deferred updates of these parameters."""
        ...

    def fork(self) -> None:
        """Mark this point: the next concurrent block overlaps with all that is computed from here on."""
        ...

    def beside(self) -> AbstractContextManager[None]:
        """In a ``with`` block, work concurrently with compute since the fork, if possible; what comes next waits."""
        ...


class LayerSlab:
    """The streamed weights of one layer, contiguous in one host tensor, so that one copy moves them all.

    Args:
        layer: its weights are copied to the slab and released.
        is_streamed: whether a parameter is streamed.
        host: the host memory in which the slab is allocated.
        stub_of: a tensor without memory of its own, like the given one, that a parameter shows while it is away.
    """

    def __init__(
        self,
        layer: nn.Module,
        is_streamed: Callable[[nn.Parameter], bool],
        host: HostMemory,
        stub_of: Callable[[Tensor], Tensor],
    ) -> None:
        self._device = host.device
        tensors: list[StreamedTensor] = []
        self.parameters: list[nn.Parameter] = []
        for module in layer.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if is_streamed(parameter):
                    tensors += streamed_tensors(module, name, stub_of(parameter))
                    self.parameters.append(module.get_parameter(name))
        self._holders = [tensor.holders for tensor in tensors]
        self._stubs = [stub_of(tensor.tensor) for tensor in tensors]
        num_bytes = sum(_aligned(stub.nbytes) for stub in self._stubs)
        self.memory = host.allocate(num_bytes, torch.uint8, "parameter")
        for tensor, place in zip(tensors, self._views(self.memory), strict=True):
            place.copy_(tensor.tensor)
        self.evict()

    def load(self, memory: Tensor) -> None:
        """Point the layer's parameters at a copy of the slab."""
        self._point_at(self._views(memory))

    def evict(self) -> None:
        """Point the layer's parameters at stubs, which have only their shapes."""
        self._point_at(iter(self._stubs))

    def materialize(self) -> None:
        """Point the layer at the slab itself, each tensor with its own storage; fake parameters keep their device."""
        if is_virtual(self._device):
            torch.get_device_module(self._device).host_may_use(self.memory)
        else:
            self._point_at(with_own_storage(view) for view in self._views(self.memory))

    def _point_at(self, tensors: Iterator[Tensor]) -> None:
        for holders, tensor in zip(self._holders, tensors, strict=True):
            StreamedTensor(tensor, holders).point_at(tensor)

    def _views(self, memory: Tensor) -> Iterator[Tensor]:
        start = 0
        for stub in self._stubs:
            yield memory[start : start + stub.nbytes].view(stub.dtype).view(stub.shape)
            start += _aligned(stub.nbytes)


@dataclass
class _Slot:
    memory: Tensor
    holds: int | None = None
    filled: CopyEvent = field(default_factory=CopyEvent)
    emptied: CopyEvent = field(default_factory=CopyEvent)
    """The end of the last copy to the host: before it the slot must not change."""


class LayerStream:
    """Copies each layer's weights to the device for its visit, and changed ones back.

    Args:
        slabs: one for each streamed layer, first layer first.
        engine: makes the copies.
        device: the device of the slots.

    Attributes:
        updates: the updater of the weights; None while they are not trained.
        num_loads: copies of a slab to the device so far.
        is_updating: whether the weights in a slot are newer than their slab, and not yet being copied there.
    """

    def __init__(self, slabs: Sequence[LayerSlab], engine: CopyEngine, device: torch.device) -> None:
        self.slabs = slabs
        self.updates: SupportsDeferredUpdates | None = None
        self.num_loads = 0
        self._engine = engine
        self._slots = [
            _Slot(torch.empty(_largest(slabs[number::NUM_SLOTS]), dtype=torch.uint8, device=device))
            for number in range(min(NUM_SLOTS, len(slabs)))
        ]
        self._visiting: int | None = None
        self._is_changed = False
        self.is_updating = False

    @property
    def slot_memory(self) -> list[Tensor]:
        """The memory of each slot."""
        return [slot.memory for slot in self._slots]

    @property
    def slot_bytes(self) -> int:
        """Device bytes of all slots."""
        return sum(memory.nbytes for memory in self.slot_memory)

    @torch.no_grad()
    def visit(self, index: int, *, then: int, in_backward: bool) -> None:
        """Point a layer at its weights in its slot; evict the layer before, and start copying the one after.

        Args:
            index: number of the layer.
            then: number of the layer that comes next; ignored if there is no layer of that number.
            in_backward: whether this visit's gradients may change the weights.
        """
        if self._visiting != index:
            self.end_visit()
        if not in_backward and self._has_waiting(index):
            self._update(index)
        if self._visiting != index:
            slot = self._load(index)
            self._engine.wait(slot.filled)
            if self.updates is not None and self.updates.updates_at_once:
                self._engine.wait(slot.emptied)
            self.slabs[index].load(slot.memory)
            self._visiting = index
        if 0 <= then < len(self.slabs):
            self._load(then)
            if not in_backward and self.updates is not None and self._has_waiting(then):
                self.updates.fork()
        self._is_changed |= in_backward and self.updates is not None and self.updates.updates_at_once

    @torch.no_grad()
    def end_visit(self) -> None:
        """Evict the visiting layer, if there is one; what its visit changed is copied to the host."""
        if self._visiting is None:
            return
        if self._is_changed:
            self._write_back(self._visiting)
        self.slabs[self._visiting].evict()
        self._visiting, self._is_changed = None, False

    def flush(self) -> None:
        """Make all deferred updates, and end all copies: the slabs are then up to date."""
        waiting = list(filter(self._has_waiting, range(len(self.slabs))))
        for index in range(waiting[0], waiting[-1] + 1) if waiting else ():  # each updates the next one
            self.visit(index, then=index + 1, in_backward=False)
        self.end_visit()
        self._engine.synchronize()

    def abandon(self) -> None:
        """Evict the visiting layer in the middle of a step; a copy to a slot may have failed halfway."""
        self.end_visit()
        self.forget()

    def forget(self) -> None:
        """Invalidate the slots, so that they are loaded again: the slabs may have changed."""
        for slot in self._slots:
            slot.holds = None

    def _has_waiting(self, index: int) -> bool:
        return self.updates is not None and self.updates.has_deferred(self.slabs[index].parameters)

    def _update(self, index: int) -> None:
        """Make a layer's deferred updates in its slot, and copy it back; if possible, during the layer before.

        They are issued after that layer: the host may have to wait for files, and the device has work meanwhile.
        """
        assert self.updates is not None, "the pending updates have an owner"
        slot, slab = self._load(index), self.slabs[index]
        with self.updates.beside():
            self._engine.wait(slot.filled)
            # The slot may still be being copied to the host since its last update.
            self._engine.wait(slot.emptied)
            slab.load(slot.memory)
            self.is_updating = True
            self.updates.apply(slab.parameters)
            self._write_back(index)
            self.is_updating = False

    def _load(self, index: int) -> _Slot:
        slot, slab = self._slots[index % NUM_SLOTS], self.slabs[index]
        if slot.holds != index:
            # The slab's last copy from the device was made from this very slot.
            after = (self._engine.now(), slot.emptied)
            place = slot.memory[: slab.memory.nbytes]
            slot.filled = self._engine.to_device(slab.memory, place, after=after)
            slot.holds = index
            self.num_loads += 1
        return slot

    def _write_back(self, index: int) -> None:
        slot, slab = self._slots[index % NUM_SLOTS], self.slabs[index]
        place = slot.memory[: slab.memory.nbytes]
        slot.emptied = self._engine.to_host(place, slab.memory, keep=False)


def _largest(slabs: Sequence[LayerSlab]) -> int:
    return max(slab.memory.nbytes for slab in slabs)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
