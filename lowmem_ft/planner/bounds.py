"""Lower bounds of a step of a recipe: bytes at rest, matrix products, and bytes over the host link.

Nothing here is an estimate: these numbers only spare a search the combinations that cannot work. Each bound holds
whatever the other settings are (``tests/planner/test_bounds.py`` checks them against estimates). The only activations
counted are those that autograd cannot do without: inputs of trained matrices and of attention, inputs of checkpointed
layers, and logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lowmem_ft.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.models.loading import compute_dtype
from lowmem_ft.models.saving import MAX_SHARD_BYTES
from lowmem_ft.optimizers.formats.master_formats import master_format
from lowmem_ft.recipe import Recipe
from lowmem_ft.system.process_size import PROCESS_BESIDE_GPU_BYTES
from lowmem_ft.techniques.activation_offload import SMALLEST_BYTES
from lowmem_ft.techniques.modules.decoder_layers import decoder_layers
from lowmem_ft.virtual_gpu.replay.timing.clock import host_link_rate, matmul_rate

BYTES_KEYS = ("model", "adapter", "optimizer", "offload", "accumulation", "training", "distributed")
"""Groups that the bounds of device bytes read; those of seconds, of the host and of activations read the next too."""

STEP_KEYS = (*BYTES_KEYS, "checkpointing", "data")

ACTIVATION_KEYS = (
    "model.dtype",
    "adapter.name",
    "accumulation.order",
    "training",
    "checkpointing",
    "data.max_length",
    "loss.chunk_tokens",
    "tiling",
    "offload.activations",
)

_LOGIT_BYTES = 8.0
"""Bytes per logit of a model's own loss, which holds float32 logits and their gradients together."""

_QUANTIZED_BYTES = {"nf4": 0.5, "int8": 1.0}
"""Bytes per element, without the scales."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model that the bounds read.

    Args:
        num_layers: decoder layers.
        parameters: all elements; tied weights count once.
        layer_parameters: elements of all decoder layers.
        products: elements of the layers' matrices that every token passes; not experts, as a token passes only some.
        products_again: those of them that recomputing all layers passes: it ends before each layer's last product.
        head_products: elements of the head.
        outer_parameters: elements of the embedding and the head; tied weights count once.
        widths: elements per token that backward needs of all decoder layers, see :func:`_width`.
        outputs: elements per token that the layers' matrices give.
        hidden_size: elements per token between layers.
        vocab_size: logits per token.
        longest_row: tokens of a row, if ``data.max_length`` is null.
        checkpoint_dtype: type of the weights, if ``model.dtype`` is auto.
    """

    num_layers: int
    parameters: int
    layer_parameters: int
    products: int
    products_again: int
    head_products: int
    outer_parameters: int
    widths: int
    outputs: int
    hidden_size: int
    vocab_size: int
    longest_row: int
    checkpoint_dtype: torch.dtype

    def dtype_of(self, recipe: Recipe) -> torch.dtype:
        """Return the type of the weights: ``model.dtype``, or the checkpoint's own."""
        name = recipe.model.dtype
        return self.checkpoint_dtype if name == "auto" else getattr(torch, name)


def shape_of(model: PreTrainedModel, longest_row: int, checkpoint_dtype: torch.dtype) -> ModelShape:
    """Return the shape of a model on the meta device.

    Args:
        model: its modules; their types do not matter.
        longest_row: tokens of a row, if ``data.max_length`` is null.
        checkpoint_dtype: type of the weights, if ``model.dtype`` is auto.

    Returns:
        The shape; a model without a single stack of decoder layers gets one with looser bounds.
    """
    try:
        layers: list[nn.Module] = list(decoder_layers(model))
    except ModelError:
        layers = []
    products = [[matrix.weight.numel() for _, matrix in _matrices(layer)] for layer in layers]
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    outer = {part.weight for part in (head, table) if isinstance(part, nn.Linear | nn.Embedding)}
    return ModelShape(
        num_layers=len(layers),
        parameters=_numel(model),
        layer_parameters=sum(_numel(layer) for layer in layers),
        products=sum(map(sum, products)),
        products_again=sum(sum(of_layer) - max(of_layer, default=0) for of_layer in products),
        head_products=head.weight.numel() if isinstance(head, nn.Linear) else 0,
        outer_parameters=sum(weight.numel() for weight in outer),
        widths=sum(_width(layer, model.config.get_text_config()) for layer in layers),
        outputs=sum(matrix.out_features for layer in layers for _, matrix in _matrices(layer)),
        hidden_size=getattr(model.config.get_text_config(), "hidden_size", 0),
        vocab_size=head.weight.shape[0] if isinstance(head, nn.Linear) else 0,
        longest_row=longest_row,
        checkpoint_dtype=checkpoint_dtype,
    )


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _matrices(layer: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the matrices that every token passes, with the last part of their names."""
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear) and "expert" not in name:
            yield name.rpartition(".")[2], module


def _width(layer: nn.Module, hf_config: PreTrainedConfig) -> int:
    """Return the elements per token that backward needs of a layer: its matrices' inputs; equal widths count once.

    If the matrices have Llama's names, adds what is known to be kept: queries, keys, values and the attention output,
    and in a gated MLP both factors of its product; a smooth activation also keeps its input.
    """
    named = dict(_matrices(layer))
    width = sum({matrix.in_features for name, matrix in named.items() if name != "o_proj"})
    if {"q_proj", "k_proj", "v_proj", "o_proj"} <= named.keys():
        width += named["o_proj"].in_features
        width += sum(named[name].out_features for name in ("q_proj", "k_proj", "v_proj"))
    if {"gate_proj", "up_proj", "down_proj"} <= named.keys():
        is_smooth = str(getattr(hf_config, "hidden_act", "")).startswith(("silu", "gelu"))
        width += (3 if is_smooth else 2) * named["up_proj"].out_features
    return width


def device_bytes(recipe: Recipe, shape: ModelShape, gpu: Gpu) -> float:
    """Return device bytes of the process at the end of a step's last backward or last forward pass, the larger."""
    forward = bytes_before_backward(recipe, shape) + activation_bytes(recipe, shape)
    return gpu.context_bytes + max(bytes_after_backward(recipe, shape), forward)


def bytes_after_backward(recipe: Recipe, shape: ModelShape) -> float:
    """Return the bytes of weights, state and gradients at the end of the last backward pass."""
    if recipe.distributed.cpu_offload:
        return 0.0
    return _weights(recipe, shape) + _state(recipe, shape) + _gradients(recipe, shape)


def bytes_before_backward(recipe: Recipe, shape: ModelShape) -> float:
    """Return the bytes of weights, state and earlier micro-batches' gradients at the end of the last forward pass."""
    if recipe.distributed.cpu_offload:
        return _gathered(recipe, shape)
    before = 0.0
    if _sums_over_passes(recipe) and not recipe.optimizer.in_backward:
        before = _gradients(recipe, shape)
    return _weights(recipe, shape) + _gathered(recipe, shape) + _state(recipe, shape) + before


def activation_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """Return the least bytes that autograd keeps, at the end of the last forward pass.

    A layer keeps the inputs of its trained matrices and of attention, a checkpointed one its own input; in vertical
    order for all micro-batches. A model's own loss holds all logits of these tokens.
    """
    begins, again = begin_bytes(recipe, shape), share_again(recipe, shape)
    is_kept = recipe.adapter.name == "none" and recipe.tiling.mlp == 1 and recipe.offload.activations != "all"
    kept = kept_tokens(recipe, shape) * activation_itemsize(recipe, shape) * shape.widths if is_kept else 0.0
    has_logits = recipe.loss.chunk_tokens is None and recipe.tiling.head == 1
    logits = _LOGIT_BYTES * kept_tokens(recipe, shape) * shape.vocab_size if has_logits else 0.0
    return again * begins + (1.0 - again) * kept + logits


def begin_bytes(recipe: Recipe, shape: ModelShape, *, on_host: bool = False) -> float:
    """Return the bytes of all layers' inputs, if all are checkpointed and their inputs are kept there.

    Leaves out what selective checkpointing keeps of attention: that is nothing with dropout or without a fused kernel.
    """
    width = shape.hidden_size * activation_itemsize(recipe, shape)
    stays = recipe.offload.activations == "all" and micro_batch_tokens(recipe, shape) * width < SMALLEST_BYTES
    if (recipe.offload.activations == "none") is on_host or (stays and on_host):
        return 0.0
    return float(kept_tokens(recipe, shape) * shape.num_layers * width)


def micro_batch_tokens(recipe: Recipe, shape: ModelShape) -> int:
    """Return the tokens of a micro-batch of the longest rows."""
    return recipe.training.per_device_train_batch_size * (recipe.data.max_length or shape.longest_row)


def kept_tokens(recipe: Recipe, shape: ModelShape) -> int:
    """Return the tokens whose activations exist at once: in vertical order those of all micro-batches."""
    is_vertical = recipe.accumulation.order == "vertical"
    num_micro_batches = recipe.training.gradient_accumulation_steps if is_vertical else 1
    return num_micro_batches * micro_batch_tokens(recipe, shape)


def activation_itemsize(recipe: Recipe, shape: ModelShape) -> int:
    """Return the bytes per element of what layers compute."""
    return compute_dtype(shape.dtype_of(recipe), recipe.training.mixed_precision).itemsize


def host_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """Return host bytes while a model is saved: the process, what is offloaded (unless to files), and a file's weights.

    Layer inputs are offloaded to buffers that are kept.
    """
    begins = share_again(recipe, shape) * begin_bytes(recipe, shape, on_host=True)
    weights = _waiting_weight_bytes(recipe, shape)
    waiting = weights + (state_bytes(recipe, shape) if recipe.offload.optimizer == "host" else 0.0)
    if recipe.distributed.cpu_offload:
        waits = _weights(recipe, shape) + state_bytes(recipe, shape) + _gradients(recipe, shape)
        return PROCESS_BESIDE_GPU_BYTES + begins + waits
    if recipe.offload.optimizer == "host" and _gradients_wait(recipe):
        waiting += _kept_share(recipe) * shape.parameters * shape.dtype_of(recipe).itemsize
    if recipe.offload.folder is not None:
        waiting = 0.0
    saved = 0.0
    if recipe.adapter.name == "none":
        held = _kept_share(recipe) * shape.parameters * shape.dtype_of(recipe).itemsize
        saved = min(held - weights, MAX_SHARD_BYTES)
    return PROCESS_BESIDE_GPU_BYTES + waiting + begins + saved


def seconds(recipe: Recipe, shape: ModelShape, gpu: Gpu) -> float:
    """Return the seconds of a step's products on the device or of its host-link copies, whichever take longer."""
    copied = copied_state_bytes(recipe, shape) + copied_weight_bytes(recipe, shape)
    return max(product_seconds(recipe, shape, gpu), copied / host_link_rate(gpu))


def product_seconds(recipe: Recipe, shape: ModelShape, gpu: Gpu) -> float:
    """Return the seconds of a step's matrix products, at the device's best rate."""
    dtype = compute_dtype(shape.dtype_of(recipe), recipe.training.mixed_precision)
    return _flops(recipe, shape) / matmul_rate(gpu, str(dtype).removeprefix("torch."))


def copied_state_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """Return the bytes of optimizer state copied to the device and back in each step."""
    return state_bytes(recipe, shape) if recipe.offload.optimizer == "host" else 0.0


def copied_weight_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """Return the bytes of layers copied to the device in each pass; with FSDP2's offload, this rank's shard once."""
    if recipe.distributed.cpu_offload:
        return _weights(recipe, shape)
    return _streamed_bytes(recipe, shape) if recipe.offload.parameters == "stream" else 0.0


def _flops(recipe: Recipe, shape: ModelShape) -> float:
    training = recipe.training
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps
    length = recipe.data.max_length or shape.longest_row
    tokens, learnt = rows * length, rows * (length - 1)
    if recipe.adapter.name == "none":
        passes = 6.0  # two operations per element: forward, for the input's gradient and for the weight's
    else:
        # Frozen: there is no gradient of the weight, nor of the first layer's input.
        passes = 2.0 + 2.0 * max(0, shape.num_layers - 1) / max(1, shape.num_layers)
    head = 6.0 if recipe.adapter.name == "none" else 4.0
    return (
        tokens * (passes * shape.products + 2.0 * share_again(recipe, shape) * shape.products_again)
        + learnt * head * shape.head_products
    )


def share_again(recipe: Recipe, shape: ModelShape) -> float:
    """Return the share of layers that are computed twice."""
    config = recipe.checkpointing
    if config.mode == "none" or not shape.num_layers:
        return 0.0
    return len(range(0, shape.num_layers - config.skip_last_layers, config.every_n_layers)) / shape.num_layers


def _layer_weight_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """Return the bytes of all decoder layers at rest."""
    itemsize = shape.dtype_of(recipe).itemsize
    quantized = _QUANTIZED_BYTES.get(recipe.model.quantization, itemsize)
    return shape.products * quantized + (shape.layer_parameters - shape.products) * min(itemsize, quantized)


def _streamed_share(recipe: Recipe, shape: ModelShape) -> float:
    return max(0, shape.num_layers - recipe.offload.resident_layers) / max(1, shape.num_layers)


def _streamed_bytes(recipe: Recipe, shape: ModelShape) -> float:
    return _layer_weight_bytes(recipe, shape) * _streamed_share(recipe, shape)


def _waiting_weight_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """Return host bytes of streamed weights: layers, and in full training also the embedding and the head."""
    if recipe.offload.parameters != "stream":
        return 0.0
    outer = shape.outer_parameters * shape.dtype_of(recipe).itemsize if recipe.adapter.name == "none" else 0
    return _streamed_bytes(recipe, shape) + outer


def _kept_share(recipe: Recipe) -> float:
    """Return the share of weights, gradients and state that one process keeps."""
    config = recipe.distributed
    return 1 / (config.num_processes or 1) if config.strategy == "fsdp2" else 1.0


def _weights(recipe: Recipe, shape: ModelShape) -> float:
    layers = _layer_weight_bytes(recipe, shape)
    if recipe.offload.parameters == "stream":
        staying = 1 - _streamed_share(recipe, shape)
        slots = min(2, shape.num_layers - recipe.offload.resident_layers) / max(1, shape.num_layers)
        return layers * (staying + max(0.0, slots))
    whole = layers + (shape.parameters - shape.layer_parameters) * shape.dtype_of(recipe).itemsize
    return _kept_share(recipe) * whole


def _gathered(recipe: Recipe, shape: ModelShape) -> float:
    """Return the bytes of whole layers that FSDP2 holds from forward to backward, in addition to the rank's shard."""
    config = recipe.distributed
    stays = config.strategy == "fsdp2" and not config.reshards
    return _layer_weight_bytes(recipe, shape) if stays else 0.0


def state_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """Return the bytes of optimizer state, wherever it is stored: averages, and master tensors of 16-bit weights."""
    optimizer = recipe.optimizer
    if recipe.adapter.name != "none":
        return 0.0
    if not optimizer.row.takes_formats:
        return _kept_share(recipe) * optimizer.state_bytes * shape.parameters
    beside = master_format(optimizer.master, shape.dtype_of(recipe)).tensors.values()
    a_parameter = optimizer.state_bytes + sum(dtype.itemsize for dtype in beside)
    return _kept_share(recipe) * a_parameter * shape.parameters


def _state(recipe: Recipe, shape: ModelShape) -> float:
    form = recipe.optimizer.row.bitsandbytes
    is_elsewhere = recipe.offload.optimizer == "host" or (form is not None and form.paged)
    return 0.0 if is_elsewhere else state_bytes(recipe, shape)


def _gradients(recipe: Recipe, shape: ModelShape) -> float:
    """Return the bytes of trained weights' gradients: all exist at once unless the optimizer steps in backward."""
    if recipe.adapter.name != "none":
        return 0.0
    itemsize = shape.dtype_of(recipe).itemsize
    if recipe.optimizer.in_backward:
        waits_here = _gradients_wait(recipe) and recipe.offload.optimizer == "device"
        return _kept_share(recipe) * shape.parameters * itemsize if waits_here else 0.0
    summed = _sums_over_passes(recipe) and recipe.accumulation.dtype == "float32"
    return _kept_share(recipe) * shape.parameters * (4 if summed else itemsize)


def _sums_over_passes(recipe: Recipe) -> bool:
    """Return whether a backward pass adds to the gradients of earlier micro-batches."""
    return recipe.training.gradient_accumulation_steps > 1 and recipe.accumulation.order == "horizontal"


def _gradients_wait(recipe: Recipe) -> bool:
    """Return whether gradients wait for their norm while the optimizer steps in backward."""
    return (
        recipe.optimizer.in_backward
        and recipe.training.max_grad_norm is not None
        and recipe.adapter.name == "none"
    )
