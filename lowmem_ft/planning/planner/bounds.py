"""Lower bounds of a step of a recipe: bytes at rest, matrix products, and bytes over the host link.

Nothing here is an estimate: these numbers only spare a search the combinations that cannot work. Bytes are those of a
step without techniques, of which each memory knob states what it leaves (``foundation/memory/least_memory.py``); one
that states nothing makes all bounds 0. The only activations counted are those that autograd cannot do without: inputs
of trained matrices and of attention, inputs of checkpointed layers, and logits.
``tests/planning/planner/test_bounds.py`` checks the bounds against estimates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.knob import NO_EFFECT
from lowmem_ft.foundation.memory.least_memory import (
    NOTHING,
    PARTS,
    Held,
    Part,
    Statement,
    StepFacts,
    StepParts,
    gone_unless,
)
from lowmem_ft.foundation.system.process_size import HOST_BYTES_WITH_CUDA
from lowmem_ft.models.files.stored_quantization import BYTES_OF_LEAST
from lowmem_ft.models.hf_config import compute_dtype
from lowmem_ft.models.quantizing.stored_quantizers import packed_format
from lowmem_ft.models.saving import MAX_SHARD_BYTES
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.reading.keys import RecipeKey, recipe_keys
from lowmem_ft.techniques.checkpointing.recomputed_activation import recomputed_width
from lowmem_ft.techniques.modules.model_parts import decoder_layers, tensor_of_experts
from lowmem_ft.virtual_gpu.replay.timing.clock import host_link_rate
from lowmem_ft.virtual_gpu.replay.timing.kernel_rates import matmul_rate

PRODUCT_KEYS = ("model", "adapter.name", "training", "checkpointing", "data.max_length")
"""Keys and groups that the bound of products reads, in addition to those of :func:`unknown_knobs`."""

_LOGIT_BYTES = 8.0
"""Bytes per logit of a model's own loss, which holds float32 logits and their gradients together."""


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
        activated: elements per token that ``checkpointing.mlp_activation=recompute`` does not keep.
        hidden_size: elements per token between layers.
        vocab_size: logits per token.
        longest_row: tokens of a row, if ``data.max_length`` is null.
        checkpoint_dtype: type of the weights, if ``model.dtype`` is auto.
        packed_itemsize: least bytes of an element of the layers' weights as the files hold them; None: they are plain.
        tensor_of_experts: name of a layer's parameter that holds several experts; empty: there is no such parameter.
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
    activated: int
    hidden_size: int
    vocab_size: int
    longest_row: int
    checkpoint_dtype: torch.dtype
    packed_itemsize: float | None = None
    tensor_of_experts: str = ""

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
        activated=sum(recomputed_width(layer) for layer in layers),
        hidden_size=getattr(model.config.get_text_config(), "hidden_size", 0),
        vocab_size=head.weight.shape[0] if isinstance(head, nn.Linear) else 0,
        longest_row=longest_row,
        checkpoint_dtype=checkpoint_dtype,
        packed_itemsize=BYTES_OF_LEAST.get(packed_format(model.config) or ""),
        tensor_of_experts=max(map(tensor_of_experts, layers), default=""),
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


def parts_of(recipe: Recipe, shape: ModelShape) -> StepParts:
    """Return what a recipe's knobs leave of each part of its step."""
    return {part: held_of(part, recipe, shape, statements_of(part)) for part in PARTS}


def statements_of(part: Part) -> list[tuple[RecipeKey, Statement]]:
    """Return (key, statement) for a part, in the recipe's order; an unknown knob is assumed to remove all of it.

    The part depends only on the values of these keys, and on values that no plan changes.
    """
    known = [
        (key, key.remaining_bytes[part])
        for key in recipe_keys().values()
        if key.remaining_bytes is not None and part in key.remaining_bytes
    ]
    return [*known, *((key, gone_unless()) for key in unknown_knobs())]


def unknown_knobs() -> list[RecipeKey]:
    """Return the memory knobs that do not state what they leave: they may free anything."""
    return [key for key in recipe_keys().values() if key.effects is not None and key.remaining_bytes is None]


def _is_on(key: RecipeKey, recipe: Recipe) -> bool:
    return key.remaining_bytes is not None or key.effect_of(key.value_in(recipe)) is not NO_EFFECT


def held_of(
    part: Part, recipe: Recipe, shape: ModelShape, statements: Sequence[tuple[RecipeKey, Statement]]
) -> Held:
    """Return what a recipe's knobs leave of one part, by :func:`statements_of` it."""
    held, facts = _plain(part, recipe, shape), _facts(recipe, shape)
    for key, statement in statements:
        if _is_on(key, recipe):
            held = statement(held, key.value_in(recipe), facts)
    return held


def _plain(part: Part, recipe: Recipe, shape: ModelShape) -> Held:
    """Return a part of a step without techniques, at the recipe's sizes and types."""
    itemsize, tokens = shape.dtype_of(recipe).itemsize, micro_batch_tokens(recipe, shape)
    if part in ("layers", "gathered"):
        return Held(itemsize * shape.layer_parameters)
    if part == "outer":
        return Held(itemsize * shape.outer_parameters)
    if part == "rest":
        return Held(itemsize * (shape.parameters - shape.layer_parameters - shape.outer_parameters))
    if part == "state":
        return Held(recipe.optimizer.bytes_with(itemsize) * shape.parameters)
    if part == "gradients":
        return Held(itemsize * shape.parameters)
    if part == "sums":
        return Held(4.0 * shape.parameters) if recipe.training.gradient_accumulation_steps > 1 else NOTHING
    if part == "saved":
        return Held(host=itemsize * shape.parameters)
    if part == "inputs":
        return Held(shape.num_layers * tokens * shape.hidden_size * activation_itemsize(recipe, shape))
    if part == "activations":
        return Held(tokens * activation_itemsize(recipe, shape) * shape.widths)
    return Held(_LOGIT_BYTES * tokens * shape.vocab_size)


def _facts(recipe: Recipe, shape: ModelShape) -> StepFacts:
    return StepFacts(
        num_layers=shape.num_layers,
        share_checkpointed=recipe.checkpointing.share_of(shape.num_layers),
        num_micro_batches=recipe.training.gradient_accumulation_steps,
        layer_input_bytes=micro_batch_tokens(recipe, shape)
        * shape.hidden_size
        * activation_itemsize(recipe, shape),
        weight_itemsize=shape.dtype_of(recipe).itemsize,
        trains_all=recipe.adapter.name == "none",
        clips=recipe.training.max_grad_norm is not None,
        steps_in_backward=recipe.optimizer.in_backward,
        plan=recipe.distributed.plan(),
        packed_itemsize=shape.packed_itemsize,
    )


def micro_batch_tokens(recipe: Recipe, shape: ModelShape) -> int:
    """Return the tokens of a micro-batch of the longest rows."""
    return recipe.training.per_device_train_batch_size * (recipe.data.max_length or shape.longest_row)


def activation_itemsize(recipe: Recipe, shape: ModelShape) -> int:
    """Return the bytes per element of what layers compute."""
    return compute_dtype(shape.dtype_of(recipe), recipe.training.mixed_precision).itemsize


def device_bytes(parts: StepParts, gpu: Gpu) -> Any:
    """Return device bytes of the process at the end of a step's last backward or last forward pass, the larger.

    Args:
        parts: those of one recipe, or arrays for many.
        gpu: the device.
    """
    forward = parts["gathered"].device + parts["sums"].device + _activation_bytes(parts)
    return gpu.context_bytes + weight_and_state_bytes(parts) + np.maximum(gradient_bytes(parts), forward)


def weight_and_state_bytes(parts: StepParts) -> Any:
    """Return the device bytes of weights and state at rest."""
    return sum(parts[part].device for part in ("layers", "outer", "rest", "state"))


def gradient_bytes(parts: StepParts) -> Any:
    """Return the device bytes of gradients at the end of the last backward pass."""
    return np.maximum(parts["gradients"].device, parts["sums"].device)


def _activation_bytes(parts: StepParts) -> Any:
    """Return the least device bytes that autograd keeps, at the end of the last forward pass."""
    return sum(parts[part].device for part in ("inputs", "activations", "logits"))


def host_bytes(parts: StepParts) -> Any:
    """Return host bytes while a model is saved: the process, what waits there, and the weights of a file.

    Buffers of layer inputs are kept for the next step.
    """
    weights = [parts[part] for part in ("layers", "outer", "rest")]
    others = (
        parts["state"].host + np.maximum(parts["gradients"].host, parts["sums"].host) + parts["inputs"].host
    )
    waiting = sum(held.host + held.disk for held in weights)
    saved = np.minimum(np.maximum(0.0, parts["saved"].host - waiting), MAX_SHARD_BYTES)
    return HOST_BYTES_WITH_CUDA + sum(held.host for held in weights) + others + saved


def seconds(recipe: Recipe, parts: StepParts, shape: ModelShape, gpu: Gpu) -> float:
    """Return the seconds of a step's products on the device or of its host-link copies, whichever take longer."""
    return max(product_seconds(recipe, shape, gpu), link_seconds(parts, gpu))


def link_seconds(parts: StepParts, gpu: Gpu) -> Any:
    """Return the seconds of copying state to the device and back, and layers there, once in each step."""
    return sum(held.link for held in parts.values()) / host_link_rate(gpu)


def product_seconds(recipe: Recipe, shape: ModelShape, gpu: Gpu) -> float:
    """Return the seconds of a step's matrix products at the device's best rate; 0 with a knob that may save some."""
    if any(_is_on(key, recipe) for key in unknown_knobs()):
        return 0.0
    dtype = compute_dtype(shape.dtype_of(recipe), recipe.training.mixed_precision)
    return _flops(recipe, shape) / matmul_rate(gpu, str(dtype).removeprefix("torch."))


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
    again = 2.0 * recipe.checkpointing.share_of(shape.num_layers) * shape.products_again
    return tokens * (passes * shape.products + again) + learnt * head * shape.head_products
