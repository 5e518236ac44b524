"""Rules of thumb for the bytes and seconds of a step and the effort of its estimate: they only start a search.

Unlike the bounds, none of this has to hold: the level of each number is learned from the estimates that a search
makes (``planner/ranking.py``), so a wrong one costs estimates, never the plan. The shares were set by hand against
estimates of Llama-3.1-8B in budgets of 12 to 80 GiB. Against the kept samples of 300 combinations each, the median of
the logarithm of expected over estimated seconds is -0.04 for that model on an H100, -0.02 on an RTX 4090 and -0.11
for Llama-3.2-1B on an RTX 4060; of device bytes it is -0.03, -0.03 and -0.14. With the level taken out, the median
error is at most 0.05 of seconds and 0.09 of bytes.

Two replacements were tried. Bounds times a learned factor found the same plan for an 8B in 24 GiB in 192 CPU seconds
instead of 109. Products, 40 passes of activations, sums, update and exposed copies, with a learned level and without
the shares of tiles, took 8.2 estimates instead of 8.0 on the kept samples, with a regret of 2.3 % instead of 2.0 %.
"""

from __future__ import annotations

from lowmem_ft.catalog.gpu_spec import Gpu
from lowmem_ft.memory.least_memory import StepParts
from lowmem_ft.planner import bounds
from lowmem_ft.planner.bounds import ModelShape
from lowmem_ft.recipe import Recipe
from lowmem_ft.virtual_gpu.replay.timing.clock import host_link_rate
from lowmem_ft.virtual_gpu.replay.timing.links import link_between

_KEPT_SHARE = 2.2
"""Share of its matrices' outputs that a layer keeps for its backward pass."""

_MLP_SHARE = 0.7
"""Share of those kept activations that is within the MLP."""

_HOST_SHARE = 1.01
"""Host memory as a share of its bound: the rest is buffers for copies."""

_TIMES_MOVED, _TIMES_MOVED_AGAIN = 42.0, 8.0
"""Times that the matrices' outputs pass through memory: forward and backward, and one more forward."""

_CASTS = 1.5
"""Factor on that traffic where some of it is float32: autocast's of float32 weights, adapters' without autocast."""

_SUMMED_BYTES = 20.0
"""Bytes per parameter that pass through memory to add a micro-batch's gradients to the earlier ones."""

_TIMES_UPDATED = 4.0
"""Times that weights, gradients and state pass through memory in an update."""

_TILED_MLP, _TILED_HEAD = 0.16, 0.03
"""Share of the products without checkpointing that tiles of the MLP and of the head recompute."""

_LOGIT_BYTES = {True: 12.0, False: 8.0}
"""Bytes per logit at the peak, by whether all logits exist at once."""


def device_bytes(recipe: Recipe, shape: ModelShape, parts: StepParts) -> float:
    """Return the expected bytes of the process at its peak, without its context."""
    tokens, chunk = bounds.micro_batch_tokens(recipe, shape), recipe.loss.chunk_tokens
    token_bytes = _kept_of_a_token(recipe, shape)
    at_once = _kept_tokens(recipe, shape) if chunk is None else min(tokens, chunk)
    logits = _LOGIT_BYTES[chunk is None] * shape.vocab_size * at_once
    working = max(tokens * token_bytes, logits) + _layers_at_work(recipe, shape)
    again = recipe.checkpointing.share_of(shape.num_layers)
    offloads_all = recipe.offload.activations == "all"
    kept = _kept_tokens(recipe, shape) * shape.num_layers * token_bytes * (0.1 if offloads_all else 1.0)
    attended = _attended_bytes(recipe, shape) if recipe.checkpointing.mode == "selective" else 0.0
    waiting = parts["inputs"].device + again * attended + (1 - again) * kept
    before = parts["gathered"].device + parts["sums"].device
    return (
        working + bounds.weight_and_state_bytes(parts) + max(bounds.gradient_bytes(parts), before + waiting)
    )


def host_bytes(parts: StepParts) -> float:
    """Return the expected host bytes at the peak: about the bound, which leaves out little."""
    return _HOST_SHARE * bounds.host_bytes(parts)


def seconds(recipe: Recipe, shape: ModelShape, parts: StepParts, gpu: Gpu) -> float:
    """Return the expected seconds of a step: products, other traffic of device memory, and exposed copies."""
    again = recipe.checkpointing.share_of(shape.num_layers)
    products = bounds.product_seconds(recipe, shape, gpu)
    pieces = (_TILED_MLP if recipe.tiling.mlp > 1 else 0.0) + (_TILED_HEAD if recipe.tiling.head > 1 else 0.0)
    computed = (
        products * (1.0 + pieces / (1.0 + again / 3.0)) + _moved_bytes(recipe, shape, parts) / gpu.bandwidth
    )
    state, weights = parts["state"].link, parts["layers"].link + parts["outer"].link + parts["rest"].link
    passes = recipe.training.gradient_accumulation_steps if recipe.accumulation.order == "horizontal" else 1
    copied = (state + 2 * passes * weights) / host_link_rate(gpu)
    waited = (0.0 if recipe.optimizer.in_backward else state) + 0.5 * passes * weights
    return max(
        computed + waited / host_link_rate(gpu),
        copied,
        _sent_bytes(recipe, shape) / _sending_rate(recipe, gpu),
    )


def _moved_bytes(recipe: Recipe, shape: ModelShape, parts: StepParts) -> float:
    """Return the bytes moved by all kernels other than products: activations, summed gradients, and updates."""
    training, itemsize = recipe.training, shape.dtype_of(recipe).itemsize
    num_micro_batches = training.gradient_accumulation_steps
    tokens = bounds.micro_batch_tokens(recipe, shape) * num_micro_batches
    times = _TIMES_MOVED + _TIMES_MOVED_AGAIN * recipe.checkpointing.share_of(shape.num_layers)
    mixes_types = (training.mixed_precision == "no") == (itemsize < 4)
    has_float32 = itemsize == 4 or recipe.adapter.name != "none"
    casts = _CASTS if mixes_types and has_float32 else 1.0
    activations = casts * times * tokens * bounds.activation_itemsize(recipe, shape) * shape.outputs
    if recipe.adapter.name != "none":
        return activations
    summed = (num_micro_batches - 1) * _SUMMED_BYTES * shape.parameters
    updated = _TIMES_UPDATED * (sum(parts["state"][:3]) + 2 * itemsize * shape.parameters)
    return activations + summed + updated


def _sent_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """Return the bytes that a rank sends to the others: weights gathered for each pass, and gradients."""
    config = recipe.distributed
    if config.strategy not in ("ddp", "fsdp2"):
        return 0.0
    others = 1 - 1 / (config.num_processes or 1)
    whole = shape.parameters * shape.dtype_of(recipe).itemsize
    trained = shape.parameters if recipe.adapter.name == "none" else 0
    if config.strategy == "ddp":
        return others * 2 * trained * shape.dtype_of(recipe).itemsize
    is_horizontal = recipe.accumulation.order == "horizontal"
    passes = recipe.training.gradient_accumulation_steps if is_horizontal else 1
    return others * passes * ((2 if config.reshards else 1) * whole + 4 * trained)


def _sending_rate(recipe: Recipe, gpu: Gpu) -> float:
    return link_between(gpu, recipe.distributed.num_machines).bytes_per_second


def effort(recipe: Recipe) -> float:
    """Return the effort in common estimates: vertical order that keeps more than inputs traces all micro-batches."""
    if recipe.accumulation.order == "horizontal" or recipe.checkpointing.mode == "full":
        return 1.0
    return max(1.0, recipe.training.gradient_accumulation_steps / 4)


def _kept_tokens(recipe: Recipe, shape: ModelShape) -> int:
    """Return the tokens whose activations exist at once: in vertical order those of all micro-batches."""
    is_vertical = recipe.accumulation.order == "vertical"
    num_micro_batches = recipe.training.gradient_accumulation_steps if is_vertical else 1
    return num_micro_batches * bounds.micro_batch_tokens(recipe, shape)


def _attended_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """Return the bytes that selective checkpointing keeps of attention: as many as a layer's input has."""
    width = shape.hidden_size * bounds.activation_itemsize(recipe, shape)
    return float(_kept_tokens(recipe, shape) * shape.num_layers * width)


def _kept_of_a_token(recipe: Recipe, shape: ModelShape) -> float:
    """Return the bytes per token that a layer keeps for its backward pass."""
    itemsize = bounds.activation_itemsize(recipe, shape)
    tiled = 1 - _MLP_SHARE + _MLP_SHARE / recipe.tiling.mlp
    return _KEPT_SHARE * itemsize * tiled * shape.outputs / max(1, shape.num_layers)


def _layers_at_work(recipe: Recipe, shape: ModelShape) -> float:
    """Return the bytes of weights and gradients of the layers at work, with the largest gradient."""
    itemsize = shape.dtype_of(recipe).itemsize
    layer = shape.layer_parameters * itemsize / max(1, shape.num_layers)
    head = shape.head_products * itemsize / recipe.tiling.head
    if recipe.adapter.name != "none":
        return layer
    return 2 * head + (4 if recipe.offload.parameters == "stream" else 2) * layer
