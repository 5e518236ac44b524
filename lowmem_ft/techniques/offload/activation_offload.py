"""Activations kept in host memory until the backward pass, copied out and back while the device computes."""

from __future__ import annotations

import functools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.host.copy_engine import CopyEngine, CopyEvent
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.techniques.modules.model_parts import ModelParts
from lowmem_ft.techniques.modules.patching import wrap_method
from lowmem_ft.techniques.offload.config import SMALLEST_OFFLOADED_BYTES, OffloadConfig
from lowmem_ft.techniques.technique import Technique

__all__ = ["enable_activation_offload"]

log = logging.getLogger(__name__)

_ON_THEIR_WAY = {"inputs": 1, "all": 4}
"""Tensors still on the device when the next one is saved: one layer's compute time is enough to copy its input."""


def enable_activation_offload(
    model: nn.Module | ModelParts, config: OffloadConfig, host: HostMemory
) -> Technique:
    """Keep activations in host memory: the inputs of checkpointed layers, or all that backward needs.

    Each leaves the device on its own stream while the layer computes, and is prefetched one ahead of its use.

    Frees: inputs: the input (batch x tokens x hidden) of each checkpointed layer; two of them are on the device at any
    time. all: every activation of 64 KiB or more, except those being copied.
    Costs: host memory for the offloaded tensors, taken when first needed and kept, and two copies of each over PCIe.
    The copies of inputs overlap with a layer's compute; those of ``all`` hardly do, as a layer's activations take
    longer to copy than to compute.
    Equals: the same losses and gradients bit for bit.
    Limits: on a CPU the copies are made too, and free nothing. Tensors with gaps or overlaps in memory are not moved.
    Source: ZeRO, 2019 (arXiv:1910.02054), whose P_a+cpu moves activation checkpoints to the host.

    Args:
        model: a causal LM from transformers, wrapped or not, or its parts; for ``inputs`` with its checkpointing on.
        config: which activations to offload.
        host: the host memory that holds them.

    Returns:
        A handle whose ``remove()`` keeps them on the device again.

    Raises:
        ModelError: if ``inputs`` is requested and no layer is checkpointed.
    """
    if config.activations == "none":
        return Technique()
    parts = ModelParts.of(model)
    waiting_room = OffloadPool(host, _ON_THEIR_WAY[config.activations])
    if config.activations == "inputs":
        return _ActivationOffload(waiting_room, *_offload_inputs(parts, waiting_room))
    return _ActivationOffload(waiting_room, _offload_all(parts.base, waiting_room))


class _ActivationOffload(Technique):
    """Activations on the host; see :func:`enable_activation_offload`."""

    def __init__(self, waiting_room: OffloadPool, *undo: Callable[[], object]) -> None:
        super().__init__(*undo)
        self._waiting_room = waiting_room

    def abandon(self) -> None:
        """Drop the activations that were still leaving the device: no backward will ask for them."""
        self._waiting_room.abandon()


def _offload_inputs(parts: ModelParts, waiting_room: OffloadPool) -> Iterator[Callable[[], object]]:
    layers = [layer for layer in parts.text_layers() if layer.gradient_checkpointing]
    if not layers:
        raise ModelError(
            "offload.activations=inputs needs checkpointed layers, whose inputs it offloads, but no layer is "
            "checkpointed. Set checkpointing.mode=full, or offload.activations=none."
        )
    log.info("Activation offload: the inputs of %d checkpointed layers are kept in host memory.", len(layers))
    with_input_away = functools.partial(_WithInputAway, waiting_room)
    for layer in layers:
        yield wrap_method(layer, "_gradient_checkpointing_func", with_input_away)


class _WithInputAway:
    """A checkpointing function whose first argument, the hidden states, is offloaded to host memory."""

    def __init__(self, waiting_room: OffloadPool, checkpoint: Callable[..., Any]) -> None:
        self._waiting_room = waiting_room
        self._checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        if not args or not isinstance(args[0], Tensor):
            raise ModelError(
                "offload.activations=inputs needs layers that are called with their hidden states first, by position; "
                "the layers of this model are not. Set offload.activations=none."
            )
        hidden_storage = args[0].untyped_storage()._cdata

        def pack(tensor: Tensor) -> Tensor | OffloadedTensor:
            is_hidden = tensor.untyped_storage()._cdata == hidden_storage
            return self._waiting_room.leave(tensor) if is_hidden and _is_dense(tensor) else tensor

        # What the function itself saves is left to the checkpoint, whose hooks are entered inside these.
        with saved_tensors_hooks(pack, self._waiting_room.back):
            return self._checkpoint(function, *args)


def _offload_all(causal_lm: Any, waiting_room: OffloadPool) -> Callable[[], object]:
    def with_activations_away(stock_forward: Callable[..., Any]) -> Callable[..., Any]:
        # Trainer reads the signature to learn which columns forward takes.
        @functools.wraps(stock_forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            weights = {
                tensor.untyped_storage()._cdata for tensor in (*causal_lm.parameters(), *causal_lm.buffers())
            }

            def pack(tensor: Tensor) -> Tensor | OffloadedTensor:
                stays = (
                    tensor.nbytes < SMALLEST_OFFLOADED_BYTES
                    or tensor.device.type != waiting_room.device.type
                    or tensor.untyped_storage()._cdata in weights
                    or not _is_dense(tensor)
                )
                return tensor if stays else waiting_room.leave(tensor)

            with saved_tensors_hooks(pack, waiting_room.back):
                return stock_forward(*args, **kwargs)

        return forward

    log.warning(
        "offload.activations=all copies every activation to the host and back, which takes longer than computing it "
        "again: checkpointing.mode=full with offload.activations=inputs frees more in less time."
    )
    return wrap_method(causal_lm, "forward", with_activations_away)


class OffloadedTensor:
    """A saved tensor kept on the host until nothing in the graph needs it any more.

    Attributes:
        buffer: host memory that holds its values.
        on_device: the tensor before it has left, and once its copy back has been started.
        left: event at which its copy is on the host.
        arrives: event at which it is back on the device; None if its copy back has not been started.
        returned: the tensor that backward got.
        saved_before: the tensor saved before this one, which is needed after it.
    """

    def __init__(self, tensor: Tensor, buffer: Tensor, room: OffloadPool) -> None:
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.buffer = buffer
        self.on_device: Tensor | None = tensor.detach()
        self.left = CopyEvent()
        self.arrives: CopyEvent | None = None
        self.returned: weakref.ref[Tensor] | None = None
        self.saved_before: weakref.ref[OffloadedTensor] | None = None
        self._room = room

    @property
    def host(self) -> Tensor:
        """The values in host memory, in the order of the tensor's memory."""
        num_bytes = self.shape.numel() * self.dtype.itemsize
        return self.buffer[:num_bytes].view(self.dtype)

    def __del__(self) -> None:
        self._room.forget(self)


class OffloadPool:
    """The pool of tensors offloaded to the host.

    Args:
        host: its memory.
        num_leaving: how many of the last tensors saved are still on the device.
    """

    def __init__(self, host: HostMemory, num_leaving: int) -> None:
        self.device = host.device
        self._num_leaving = num_leaving
        self._copies = CopyEngine(host.device)
        self._buffers = _Buffers(host)
        self._leaving: deque[OffloadedTensor] = deque()
        self._last_saved: weakref.ref[OffloadedTensor] | None = None
        self._away: weakref.WeakValueDictionary[tuple[Any, ...], OffloadedTensor] = (
            weakref.WeakValueDictionary()
        )

    def leave(self, tensor: Tensor) -> OffloadedTensor:
        """Send a dense tensor to the host, unless that was done when it was saved before."""
        place = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        # Not the storage's address, which another storage may take over later.
        key = (weakref.ref(tensor.untyped_storage()), *place)
        away = self._away.get(key)
        if away is None:
            away = self._away[key] = self._send(tensor)
        return away

    def back(self, saved: Tensor | OffloadedTensor) -> Tensor:
        """Return the saved tensor on the device, and start copying back the one saved before it, needed next."""
        if isinstance(saved, Tensor):
            return saved
        self._let_go(0, forget=False)
        tensor = None if saved.returned is None else saved.returned()
        if tensor is None:
            tensor = self._sent_for(saved)
            self._wait_for_arrival(saved)
            saved.on_device, saved.returned = None, weakref.ref(tensor)
        earlier = None if saved.saved_before is None else saved.saved_before()
        if earlier is not None and earlier.returned is None:
            self._sent_for(earlier)
        return tensor

    def abandon(self) -> None:
        """Drop the tensors that are leaving, once they have left."""
        self._let_go(0, forget=True)

    def forget(self, away: OffloadedTensor) -> None:
        """Release the buffer of a tensor that nothing needs any more."""
        self._wait_for_arrival(away)  # if it was copied back in vain
        self._buffers.give_back(away.buffer)

    def _send(self, tensor: Tensor) -> OffloadedTensor:
        away = OffloadedTensor(tensor, self._buffers.take(tensor.nbytes), self)
        away.left = self._copies.to_host(_flat(tensor), away.host, keep=False)
        away.saved_before, self._last_saved = self._last_saved, weakref.ref(away)
        self._let_go(self._num_leaving - 1, forget=True)
        self._leaving.append(away)
        return away

    def _let_go(self, num_left: int, *, forget: bool) -> None:
        """Make the computing stream wait for copies to the host, after which their tensors' memory may be used again.

        Args:
            num_left: how many of the last ones not to wait for.
            forget: whether to drop the tensors; in backward they are about to be asked for.
        """
        while len(self._leaving) > num_left:
            away = self._leaving.popleft()
            self._copies.wait(away.left)
            if forget:
                away.on_device = None

    def _sent_for(self, away: OffloadedTensor) -> Tensor:
        """Return the tensor on the device; its copy may still be in progress."""
        if away.on_device is None:
            away.on_device = torch.empty_strided(
                away.shape, away.stride, dtype=away.dtype, device=self.device
            )
            # The computing stream has waited for the copy to the host, and this copy waits for it: see back().
            away.arrives = self._copies.to_device(away.host, _flat(away.on_device))
        return away.on_device

    def _wait_for_arrival(self, away: OffloadedTensor) -> None:
        if away.arrives is not None:
            self._copies.wait(away.arrives)
            away.arrives = None


class _Buffers:
    """Reused host memory: as many buffers as were ever needed at once, of the sizes last needed.

    A buffer may be given back while a copy still reads it: the next copy into it waits for all compute so far, which
    has waited for that copy.
    """

    def __init__(self, host: HostMemory) -> None:
        self._host = host
        self._free: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        """Take the smallest free buffer that is large enough; else a new one, in place of the largest free one."""
        self._free.sort(key=len)
        for index, buffer in enumerate(self._free):
            if len(buffer) >= num_bytes:
                return self._free.pop(index)
        if self._free:
            self._free.pop()
        return self._host.allocate(num_bytes, torch.uint8, "activation")

    def give_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their part of memory without gaps or overlaps, in any order of dimensions."""
    by_stride = sorted(range(tensor.dim()), key=lambda dim: tensor.stride(dim), reverse=True)
    return tensor.permute(by_stride).is_contiguous()


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order of its memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
