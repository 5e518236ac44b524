"""Decoder layers whose weights wait in host memory and visit one of two slots on the device.

Layer i always visits slot ``i % 2``. While it computes, the next layer's weights travel to the other slot; the weights
of the turn, at the end of forward, and of the first layers, at the end of backward, are still there when they are
needed again. Updates that wait for the next layer's visit in forward are made in its slot meanwhile, too.

Not more slots, and no copies in pieces: by the clock of virtual GPUs (Llama 3.1 8B, 1 to 16 rows of 2048 tokens a step,
A100, H100 and RTX 4090, 2026-11-23) a third slot, with each layer sent for two ahead, saves at most 0.6 % of a step for
a layer's memory, and pieces of 32 MiB save nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from lowmem_ft.foundation.devices import is_virtual
from lowmem_ft.host.copy_engine import CopyEngine, CopyEvent
from lowmem_ft.host.pinned_memory import HostMemory
from lowmem_ft.techniques.streaming.tensors import StreamedTensor, streamed_tensors, with_own_storage

ALIGNMENT = 256
"""Bytes at whose multiples each tensor begins, as the vector loads of kernels want it."""

NUM_SLOTS = 2


class SupportsDeferredUpdates(Protocol):
    """What streaming needs of whoever updates weights: see ``optimizer_in_backward.InBackward``."""

    updates_at_once: bool
    """Whether weights are updated while their gradients are made, or when :meth:`apply` is called."""

    def defer(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave the updates of these parameters to :meth:`apply`, where they cannot be made at once."""
        ...

    def has_deferred(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether the update of any of them waits."""
        ...

    def apply(self, parameters: Iterable[nn.Parameter]) -> None:
        """Update those of them whose update waits."""
        ...

    def fork(self) -> None:
        """Let what the next :meth:`beside` does run beside all that is computed from here on."""
        ...

    def beside(self) -> AbstractContextManager[None]:
        """In a ``with`` block, work beside the computing since the fork, if that is possible; what comes next waits."""
        ...


class LayerSlab:
    """The streamed weights of one layer side by side in one host tensor, so that one copy moves them all.

    Args:
        layer: its weights are copied to the slab and let go.
        is_streamed: which of its parameters go.
        host: where the slab is allocated.
        stub_of: a tensor without memory of its own, like the given one, that parameters show while they are away.
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
        """Let the layer use a copy of the slab."""
        self._point_at(self._views(memory))

    def evict(self) -> None:
        """Let the layer use nothing: its parameters show their shapes alone."""
        self._point_at(iter(self._stubs))

    def materialize(self) -> None:
        """Let the layer use the slab itself, each tensor for itself; fake parameters cannot leave their device."""
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
    """Brings each layer's weights to the device for its visit, and changed ones back.

    Args:
        slabs: one for each streamed layer, first layer first.
        engine: copies.
        device: where the slots are.

    Attributes:
        updates: who updates the weights; None while nobody does.
        num_loads: copies of a slab to the device so far.
        is_updating: whether the weights in a slot are newer than their slab, and not on their way there.
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
        """The slots."""
        return [slot.memory for slot in self._slots]

    @property
    def slot_bytes(self) -> int:
        """Of the device, for all slots."""
        return sum(memory.nbytes for memory in self.slot_memory)

    @torch.no_grad()
    def visit(self, index: int, *, then: int, in_backward: bool) -> None:
        """Put a layer's weights in its place; the layer before leaves, and the one after sets out.

        Args:
            index: of the layer.
            then: the layer that comes next; none if there is no layer of that number.
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
        """Let the visiting layer leave, if there is one; what its visit changed sets out for the host."""
        if self._visiting is None:
            return
        if self._is_changed:
            self._write_back(self._visiting)
        self.slabs[self._visiting].evict()
        self._visiting, self._is_changed = None, False

    def flush(self) -> None:
        """Make all updates that wait, and end all copies: the slabs are then up to date."""
        waiting = list(filter(self._has_waiting, range(len(self.slabs))))
        for index in range(waiting[0], waiting[-1] + 1) if waiting else ():  # each updates the next one
            self.visit(index, then=index + 1, in_backward=False)
        self.end_visit()
        self._engine.synchronize()

    def abandon(self) -> None:
        """Let the visiting layer leave in the middle of a step; a copy to a slot may have failed halfway."""
        self.end_visit()
        self.forget()

    def forget(self) -> None:
        """Load anew what is in the slots: the slabs may have changed."""
        for slot in self._slots:
            slot.holds = None

    def _has_waiting(self, index: int) -> bool:
        return self.updates is not None and self.updates.has_deferred(self.slabs[index].parameters)

    def _update(self, index: int) -> None:
        """Make a layer's updates that wait, in its slot, and send it home; beside the layer before, where they can be.

        They are issued behind that layer: the host may have to wait for files, and the device has work meanwhile.
        """
        assert self.updates is not None, "somebody has updates that wait"
        slot, slab = self._load(index), self.slabs[index]
        with self.updates.beside():
            self._engine.wait(slot.filled)
            # It may still be on its way to the host since its last update.
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
