"""Parameter streaming: weights are kept in host memory and streamed through the device layer by layer."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowmem_ft.foundation.errors import ModelError, raise_problems
from lowmem_ft.foundation.host.copy_engine import CopyEngine, CopyEvent
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.foundation.tensors.backward_detection import is_in_backward
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.techniques.loss.head_tiles import HeadTiles
from lowmem_ft.techniques.modules.model_parts import ModelParts, tensor_of_experts
from lowmem_ft.techniques.offload.config import OffloadConfig
from lowmem_ft.techniques.streaming.embedding import StreamedEmbedding
from lowmem_ft.techniques.streaming.head import StreamedHead
from lowmem_ft.techniques.streaming.layers import LayerSlab, LayerStream, SupportsDeferredUpdates
from lowmem_ft.techniques.streaming.tensors import move_the_rest
from lowmem_ft.techniques.technique import Technique, WeightMemory

__all__ = ["enable_parameter_streaming"]

log = logging.getLogger(__name__)


class SupportsStreamedUpdates(SupportsDeferredUpdates, Protocol):
    """An updater of streamed weights, such as ``optimizer_in_backward.InBackward``."""

    def take(self, parameter: nn.Parameter, gradient: Tensor, start: int = 0) -> None:
        """Accept the finished gradient of a slice of a parameter whose gradients autograd does not collect."""
        ...

    def written(self, parameter: nn.Parameter) -> CopyEvent:
        """Return the end of the last copy of an updated weight back to the host."""
        ...


class SupportsHeadTiles(Protocol):
    """A loss that can take the head in tiles, such as ``chunked_loss.ChunkedLoss``."""

    def take_head_from(self, tiles: HeadTiles | None) -> None:
        """Take the head's weight from these tiles from now on."""
        ...


def enable_parameter_streaming(
    model: nn.Module | ModelParts,
    config: OffloadConfig,
    *,
    device: torch.device,
    host: HostMemory,
    trained: bool,
    loss: SupportsHeadTiles | None = None,
) -> ParameterStreaming:
    """Move a model to a device, except its decoder layers, embedding and head, which are streamed from the host.

    Frees: all weights of decoder layers except two layers and ``offload.resident_layers``; all of the embedding except
    the rows of a batch; all of the head, except while the loss is computed.
    Costs: each layer's weights cross the host link twice per step, and once more if they are trained; copies overlap
    with compute. The first layers at the start of forward, and the last ones at the start of backward, cost nothing:
    they are still there.
    Equals: the same losses and gradients bit for bit.
    Limits: trained weights are updated while they are on the device, by an optimizer that steps in backward
    (:meth:`ParameterStreaming.update_with`). Enable it after every technique that changes the model's forward and
    before creating the optimizer. Weights in files (``offload.folder``) may be larger than RAM, unless they are
    unpacked from GGUF; the disk then bounds the speed.
    Source: L2L: Training Large Neural Networks with Constant Memory, 2020 (arXiv:2002.05645).

    Args:
        model: a causal LM from transformers, in host memory, or its parts; a PEFT model around one, too.
        config: how many layers stay on the device.
        device: the device that it computes on.
        host: the host memory for the weights.
        trained: whether weights that require grad are streamed too; False if they are adapters, which stay on the
            device.
        loss: takes the head in tiles; None: all of it is copied for the logits.

    Returns:
        A handle whose ``remove()`` leaves a plain model on the host, with the weights as trained.

    Raises:
        ModelError: if the model's layers cannot be found, or if one that is not checkpointed has experts in one tensor.
        UserError: if ``offload.resident_layers`` exceeds the number of layers.
        DoesNotFitError: if the host has too little memory left.
    """
    parts = ModelParts.of(model)
    layers = parts.layers(way_out="offload.parameters=device")
    raise_problems([*config.problems(), *_problems(parts.model, config, len(layers))])
    num_streamed = len(layers) - config.resident_layers
    if device.type != "cpu":  # where the experts' products keep no slices: tests/invariants
        _refuse_slices_kept_for_backward(list(layers)[:num_streamed])
    # In addition to the model as loaded, each layer of which is released once it is copied.
    largest = max(sum(parameter.nbytes for parameter in layer.parameters()) for layer in layers)
    host.check(
        largest,
        "offload.parameters=stream",
        "Raise budget.host, set offload.folder or offload.parameters=device.",
        "parameter",
    )
    streaming = ParameterStreaming(
        parts,
        list(layers)[:num_streamed],
        device=device,
        host=host,
        trained=trained,
        loss=loss,
    )
    log.info(
        "Parameter streaming: %s in %s; %d of %d layers are copied to the device in turn, in slots of %s",
        format_bytes(streaming.host_bytes),
        host.place_of("parameter"),
        num_streamed,
        len(layers),
        format_bytes(streaming.layers.slot_bytes),
    )
    return streaming


def _problems(model: nn.Module, config: OffloadConfig, num_layers: int) -> Iterator[str]:
    """Yield what keeps the layers of a model from being streamed."""
    if config.resident_layers > num_layers:
        yield (
            f"offload.resident_layers must be at most {num_layers}, the number of the model's layers, got "
            f"{config.resident_layers}. Set offload.parameters=device to keep all weights on the device."
        )
    rescale_every = getattr(model.config, "rescale_every", 0)  # of RWKV
    if rescale_every > 0:
        yield (
            "offload.parameters=stream needs a model whose forward writes no weights; RWKV's scales them wherever "
            f"training and evaluation take turns, as its config has rescale_every={rescale_every}. Set "
            "offload.parameters=device, or rescale_every to 0 in its config.json."
        )


class ParameterStreaming(Technique):
    """A model whose weights are streamed; see :func:`enable_parameter_streaming`.

    Attributes:
        layers: the stream of the layers' weights.
        updates: the updater of the weights; None while they are not trained.
    """

    def __init__(
        self,
        parts: ModelParts,
        layers: Sequence[nn.Module],
        *,
        device: torch.device,
        host: HostMemory,
        trained: bool,
        loss: SupportsHeadTiles | None,
    ) -> None:
        self._model = parts.model
        self.updates: SupportsStreamedUpdates | None = None
        staying = _shared_parameters(layers) | _biases_of_quantised(layers)

        def is_streamed(parameter: nn.Parameter) -> bool:
            return (trained or not parameter.requires_grad) and parameter not in staying

        stub_of = _stubs_on(device)
        with torch.no_grad():
            slabs = [LayerSlab(layer, is_streamed, host, stub_of) for layer in layers]
            self._embedding, self._head = _outer_parts(parts, device, host, is_streamed)
            self._on_host = _weights_of(self._embedding, self._head)
            for weight in self._on_host:
                weight.data = host.allocate(weight.shape, weight.dtype, "parameter").copy_(weight.data)
            away = {parameter for slab in slabs for parameter in slab.parameters}
            move_the_rest(parts.model, device, away | self._on_host)
        self.layers = LayerStream(slabs, CopyEngine(device), device)
        outer_parts = [part for part in (self._embedding, self._head) if part is not None]
        super().__init__(
            self._leave_on_host,
            *(part.remove for part in outer_parts),
            *_visiting_hooks(layers, self.layers),
        )
        if loss is not None and self._head is not None:
            loss.take_head_from(self._head)
            self.undo_first(partial(loss.take_head_from, None))

    def weights_in_slices(self) -> set[nn.Parameter]:
        """Return the parameters whose weights are kept on the host."""
        return self._on_host.union(*(slab.parameters for slab in self.layers.slabs))

    @property
    def host_bytes(self) -> int:
        """Host bytes of the streamed weights."""
        return sum(slab.memory.nbytes for slab in self.layers.slabs) + sum(
            weight.nbytes for weight in self._on_host
        )

    def update_with(self, updates: SupportsStreamedUpdates) -> None:
        """Train the streamed weights: their gradients go to ``updates`` while they are on the device."""
        self.updates = self.layers.updates = updates
        updates.defer(parameter for slab in self.layers.slabs for parameter in slab.parameters)
        for part in (self._embedding, self._head):
            if part is not None and part.parameter.requires_grad:
                part.train_with(updates.take, partial(updates.written, part.parameter))

    def before_forward(self, input_ids_BT: Tensor, num_label_tokens: int | None) -> dict[str, Any]:
        """Announce the token ids to the embedding, whose rows the host then reads without waiting for the device."""
        if self._embedding is not None:
            self._embedding.expect(input_ids_BT)
        return {}

    @property
    def is_updating(self) -> bool:
        """True while an update runs, and also after an update has failed."""
        return self.layers.is_updating

    def abandon(self) -> None:
        """Evict all visitors; what has been updated in its visit is on the host."""
        self.layers.abandon()
        if self._head is not None:
            self._head.abandon()

    def flush(self) -> None:
        """Make all updates deferred to a layer's next visit, so that the weights on the host are current."""
        self.layers.flush()

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Keep every parameter on the host in a ``with`` block, where it can be read without a copy: for saving."""
        self.flush()
        for slab in self.layers.slabs:
            slab.materialize()
        try:
            yield
        finally:
            for slab in self.layers.slabs:
                slab.evict()
            self.layers.forget()

    def weight_memory(self) -> Iterator[WeightMemory]:
        """Yield the slots that layers use in turn, and each layer's slab."""
        for memory in self.layers.slot_memory:
            yield WeightMemory(memory)
        for slab in self.layers.slabs:
            yield WeightMemory(slab.memory, of=slab.parameters[0])

    def _leave_on_host(self) -> None:
        """Leave a plain model on the host; ``remove()`` calls this last, after hooks and stand-ins are gone."""
        self.flush()
        for slab in self.layers.slabs:
            slab.materialize()
        move_the_rest(self._model, torch.device("cpu"), set())


def _outer_parts(
    parts: ModelParts, device: torch.device, host: HostMemory, is_streamed: Callable[[Any], bool]
) -> tuple[StreamedEmbedding | None, StreamedHead | None]:
    """Return the embedding and the head if they are plain ones that are streamed; others stay on the device."""
    table, linear = parts.embedding, parts.head
    is_tied = linear is not None and table is not None and linear.weight is table.weight
    head = embedding = None
    if isinstance(linear, nn.Linear) and is_streamed(linear.weight):
        head = StreamedHead(linear, device, host, is_tied=is_tied)
    if isinstance(table, nn.Embedding) and is_streamed(table.weight):
        embedding = StreamedEmbedding(
            table, device, host, head.held_gradient if head is not None else lambda: None
        )
    return embedding, head


def _refuse_slices_kept_for_backward(layers: Sequence[nn.Module]) -> None:
    """Reject layers without checkpointing whose experts are slices of one tensor.

    For a whole weight, autograd keeps the parameter, and finds there what is loaded in backward; for a slice, it keeps
    the slot. In a checkpointed layer the slices are taken again in the visit in which they are needed.
    """
    for layer in layers:
        name = tensor_of_experts(layer)
        if name and not getattr(layer, "gradient_checkpointing", False):
            raise ModelError(
                f"offload.parameters=stream needs every layer of {type(layer).__name__} checkpointed, as the "
                f"experts' weights are slices of one tensor ({name}). Set checkpointing.mode=full, "
                "every_n_layers=1 and skip_last_layers=0."
            )


def _weights_of(embedding: StreamedEmbedding | None, head: StreamedHead | None) -> set[nn.Parameter]:
    return {part.parameter for part in (embedding, head) if part is not None}


def _shared_parameters(layers: Sequence[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters that several layers have in common: they stay on the device."""
    count = Counter(parameter for layer in layers for parameter in set(layer.parameters()))
    return {parameter for parameter, num_layers in count.items() if num_layers > 1}


def _biases_of_quantised(layers: Sequence[nn.Module]) -> set[nn.Parameter]:
    """Return biases whose type bitsandbytes changes in their first forward: once and for all, as long as they stay.

    A cast in each visit would be one in a layer's forward and none in its recomputation, if that is the same visit;
    selective checkpointing counts operations.
    """
    parts = [part._parameters for layer in layers for part in layer.modules()]
    return {
        bias
        for part in parts
        if (weight := part.get("weight")) is not None
        and not weight.is_floating_point()
        and (bias := part.get("bias")) is not None
    }


def _stubs_on(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a maker of stubs for parameters that are away: shape and type, one element's memory for all of a type."""
    elements: dict[torch.dtype, Tensor] = {}

    def stub_of(tensor: Tensor) -> Tensor:
        if tensor.dtype not in elements:
            elements[tensor.dtype] = torch.zeros(1, dtype=tensor.dtype, device=device)
        return elements[tensor.dtype].expand(tensor.shape)

    return stub_of


def _visiting_hooks(layers: Sequence[nn.Module], stream: LayerStream) -> Iterator[Callable[[], None]]:
    """Hook each layer to load its weights before its forward and again before its backward; yield the undo calls."""

    def before_forward(index: int, layer: nn.Module, args: Any) -> None:
        if not is_in_backward():  # a recomputation: the weights are there
            stream.visit(index, then=index + 1, in_backward=False)

    def before_backward(index: int, gradient: Tensor) -> None:
        stream.visit(index, then=index - 1, in_backward=True)

    def after_forward(index: int, layer: nn.Module, args: Any, output: Any) -> None:
        if is_in_backward():
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                # The gradient of a layer's output is complete right before the layer's backward.
                tensor.register_hook(partial(before_backward, index))

    for index, layer in enumerate(layers):
        yield layer.register_forward_pre_hook(partial(before_forward, index), prepend=True).remove
        yield layer.register_forward_hook(partial(after_forward, index)).remove
