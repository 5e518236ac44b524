"""Rules of thumb for the bytes and seconds of a step and the effort of its estimate: they only start a search.

Unlike the bounds, none of this has to hold: the level of each number is learned from the estimates that a search
makes (``planning/planner/search/ranking.py``), so a wrong one costs estimates, never the plan.

Nine shares stand in for what is not counted. ``scripts/calibrate expectations`` fits them to stored estimates of random
combinations, for an 8B model on two GPUs and a 1B model on another. ``expected_shares.json`` has the shares, and their
errors on each model when it is left out of the fit: the root mean square of the logarithm of seconds is at most 0.1,
and 0.06 without its level; that of device bytes is 0.06 for the 8B and 0.1 for the 1B. The samples are of an earlier
clock: its rates are read where an expectation is made, and are no part of the shares.

With a tenth share, of sums of gradients, which are counted since, searches among the kept combinations alone, in 18
budgets, found the best of them each time in 132 estimates (60 of the 8B, 72 of the 1B). With twelve shares set by hand
on the 8B they took 124 (61 and 63), and were once 0.1% slower than the best. Another replacement, bounds times a
learned factor, found the same plan for an 8B in 24 GiB in 192 CPU seconds instead of 109.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.memory.least_memory import StepParts
from lowmem_ft.planning.planner import bounds
from lowmem_ft.planning.planner.bounds import ModelShape
from lowmem_ft.recipe import Recipe
from lowmem_ft.virtual_gpu.replay.timing.clock import host_link_rate
from lowmem_ft.virtual_gpu.replay.timing.links import link_between


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares that the expectations of a step have by fitting, not by counting.

    Args:
        kept: bytes that a layer keeps for its backward pass, as a share of its matrices' outputs.
        mlp: share of a layer, of what it keeps and of its weights, that is within the MLP.
        logit_bytes: bytes per logit at the peak, if all logits exist at once.
        chunked_logit_bytes: bytes per logit of a chunk at the peak.
        at_work: weights of a layer and of the head that exist while they are at work, with gradients and copies.
        times_moved: times that the matrices' outputs pass through device memory, forward and backward.
        cast_bytes: bytes that pass through device memory where autocast rounds a float32 weight for a forward pass.
        tiled_mlp: share of the products without checkpointing that tiles of the MLP take longer.
        tiled_head: share of them that tiles of the head take longer.
    """

    kept: float
    mlp: float
    logit_bytes: float
    chunked_logit_bytes: float
    at_work: float
    times_moved: float
    cast_bytes: float
    tiled_mlp: float
    tiled_head: float


def _shares() -> Shares:
    file = resources.files("lowmem_ft.planning.planner") / "expected_shares.json"
    return Shares(**json.loads(file.read_text(encoding="utf-8"))["shares"])


SHARES = _shares()
"""The shares of ``expected_shares.json``."""


READ_KEYS = (
    *("training", "model", "adapter", "checkpointing", "tiling", "accumulation", "loss", "distributed"),
    *("data", "optimizer.in_backward", "offload.activations", "offload.parameters"),
)
"""Keys and groups that an expectation reads itself; what others change, it takes from the parts of the step."""


def device_bytes(recipe: Recipe, shape: ModelShape, parts: StepParts, shares: Shares = SHARES) -> Any:
    """Return the expected bytes of the process at its peak, without its context.

    Args:
        recipe: what is expected to need them.
        shape: the model's sizes.
        parts: those of the recipe, or arrays for many recipes that agree with it in all keys of ``READ_KEYS``.
        shares: the shares.
    """
    tokens, chunk = bounds.micro_batch_tokens(recipe, shape), recipe.loss.chunk_tokens
    token_bytes = _kept_of_a_token(recipe, shape, shares)
    kept_tokens = _kept_tokens(recipe, shape)
    if chunk is None:
        logits = shares.logit_bytes * shape.vocab_size * kept_tokens
    else:
        logits = shares.chunked_logit_bytes * shape.vocab_size * min(tokens, chunk)
    working = tokens * token_bytes + logits + _layers_at_work(recipe, shape, shares)
    again = recipe.checkpointing.share_of(shape.num_layers)
    kept_layers = min(2, shape.num_layers) if recipe.offload.activations == "all" else shape.num_layers
    attended = _attended_bytes(recipe, shape) if recipe.checkpointing.mode == "selective" else 0.0
    waiting = (
        parts["inputs"].device + again * attended + (1 - again) * kept_tokens * kept_layers * token_bytes
    )
    before = parts["gathered"].device + parts["sums"].device
    return (
        working
        + bounds.weight_and_state_bytes(parts)
        + np.maximum(_gradient_bytes(recipe, shape, parts), before + waiting)
    )


def seconds(recipe: Recipe, shape: ModelShape, parts: StepParts, gpu: Gpu, shares: Shares = SHARES) -> Any:
    """Return the expected seconds of a step: products, other traffic of device memory, and exposed copies.

    All layers together recompute a third of what they compute without checkpointing. Arguments are those of
    :func:`device_bytes`.
    """
    third_again = 1 + recipe.checkpointing.share_of(shape.num_layers) / 3
    products = bounds.product_seconds(recipe, shape, gpu)
    tiles = (shares.tiled_mlp if recipe.tiling.mlp > 1 else 0.0) + (
        shares.tiled_head if recipe.tiling.head > 1 else 0.0
    )
    if recipe.adapter.name != "none":
        tiles *= 1.5  # a forward pass again is half of the products without checkpointing, not a third
    products *= 1 + tiles / third_again
    moved = _moved_bytes(recipe, shape, parts, third_again, shares)
    computed = products + moved / (gpu.bandwidth * gpu.rates.bandwidth)
    state, weights = parts["state"].link, parts["layers"].link + parts["outer"].link + parts["rest"].link
    weights *= recipe.training.gradient_accumulation_steps if recipe.accumulation.order == "horizontal" else 1
    # Frozen weights arrive while the layer before computes: nothing has to be stepped or written back before.
    waits = recipe.adapter.name == "none"
    waited = (0.0 if recipe.optimizer.in_backward else state) + (weights if waits else 0.0)
    copied = (state + 2 * weights) / host_link_rate(gpu)
    sent = _sent_bytes(recipe, shape) / _sending_rate(recipe, gpu)
    return np.maximum(np.maximum(computed + waited / host_link_rate(gpu), copied), sent)


_PASSES_OF_A_PRODUCT = 3
"""Times that a gated activation passes its width: it reads two factors, and writes their product."""


def _moved_bytes(
    recipe: Recipe, shape: ModelShape, parts: StepParts, third_again: float, shares: Shares
) -> Any:
    """Return the bytes moved by all kernels other than products: activations, casts, summed gradients, an update."""
    training, itemsize = recipe.training, shape.dtype_of(recipe).itemsize
    num_micro_batches = training.gradient_accumulation_steps
    tokens = bounds.micro_batch_tokens(recipe, shape) * num_micro_batches
    activation_bytes: float = tokens * bounds.activation_itemsize(recipe, shape) * shape.outputs
    moved = shares.times_moved * third_again * activation_bytes
    if recipe.checkpointing.mlp_activation == "recompute":
        kept = 1 - recipe.checkpointing.share_of(shape.num_layers)
        product_bytes = tokens * bounds.activation_itemsize(recipe, shape) * shape.activated
        moved += _PASSES_OF_A_PRODUCT * kept * product_bytes
    if itemsize == 4 and training.mixed_precision != "no":
        forward = 1 + recipe.checkpointing.share_of(shape.num_layers)
        pieces = 1 - shares.mlp + shares.mlp * recipe.tiling.mlp
        moved += shares.cast_bytes * num_micro_batches * forward * pieces * shape.parameters
    if recipe.adapter.name != "none":
        # Without autocast half of what an adapted 16-bit matrix gives is the adapter's, in float32.
        return 1.5 * moved if itemsize < 4 and training.mixed_precision == "no" else moved
    moved += (num_micro_batches - 1) * _summed_bytes(recipe, itemsize) * shape.parameters
    return moved + 2 * (sum(parts["state"][:3]) + 2 * itemsize * shape.parameters)


def _summed_bytes(recipe: Recipe, itemsize: int) -> int:
    """Return the bytes per parameter that a sum is read and written in, and a product that is not added inside."""
    sum_itemsize = 4 if recipe.accumulation.dtype == "float32" else itemsize
    return 2 * (sum_itemsize + (0 if recipe.accumulation.fusion else itemsize))


def _sent_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """Return the bytes that a rank sends to the others: weights gathered for each pass, and gradients."""
    config = recipe.distributed
    plan = config.plan()
    if config.named_engine is None or plan.has_engine:
        return 0.0
    whole = shape.parameters * shape.dtype_of(recipe).itemsize
    trained = shape.parameters if recipe.adapter.name == "none" else 0
    if plan.copies_weights:
        return plan.sent_share * 2 * trained * shape.dtype_of(recipe).itemsize
    is_horizontal = recipe.accumulation.order == "horizontal"
    passes = recipe.training.gradient_accumulation_steps if is_horizontal else 1
    return plan.sent_share * passes * ((2 if config.reshards else 1) * whole + 4 * trained)


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


def _kept_of_a_token(recipe: Recipe, shape: ModelShape, shares: Shares) -> float:
    """Return the bytes per token that a layer keeps for its backward pass."""
    itemsize = bounds.activation_itemsize(recipe, shape)
    tiled = 1 - shares.mlp + shares.mlp / recipe.tiling.mlp
    again = shape.activated if recipe.checkpointing.mlp_activation == "recompute" else 0
    return itemsize * max(0.0, shares.kept * tiled * shape.outputs - again) / max(1, shape.num_layers)


def _gradient_bytes(recipe: Recipe, shape: ModelShape, parts: StepParts) -> Any:
    """Return the device bytes of gradients after backward; with several micro-batches, they are float32 sums."""
    itemsize = 4 if recipe.accumulation.dtype == "float32" else shape.dtype_of(recipe).itemsize
    is_sum = recipe.training.gradient_accumulation_steps > 1 and not recipe.optimizer.in_backward
    own = parts["gradients"].device * (itemsize / shape.dtype_of(recipe).itemsize if is_sum else 1.0)
    return np.maximum(own, bounds.gradient_bytes(parts))


def _layers_at_work(recipe: Recipe, shape: ModelShape, shares: Shares) -> float:
    """Return the bytes of weights and gradients of the layers at work, plus the next layer if they are streamed."""
    itemsize = shape.dtype_of(recipe).itemsize
    layer = shape.layer_parameters * itemsize / max(1, shape.num_layers)
    head = shape.head_products * itemsize / recipe.tiling.head
    if recipe.adapter.name != "none":
        return layer
    return shares.at_work * (head + (2 if recipe.offload.parameters == "stream" else 1) * layer)
