"""A bound is below what the estimator finds, whatever the other settings are."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
from planner_bounds import GPU, assert_bounded
from tiny_models import save_llama
from transformers import GPT2Config

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.memory.uncertainty import with_headroom
from lowmem_ft.foundation.system.process_size import HOST_BYTES_WITH_CUDA
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.planning.estimator.runtime import model_on_meta
from lowmem_ft.planning.planner import bounds, expectations
from lowmem_ft.planning.planner.plan_target import Target
from lowmem_ft.planning.planner.search.candidates import candidates_of, expected_bytes, prior_of
from lowmem_ft.planning.planner.search.estimated_needs import Limits
from lowmem_ft.recipe import load_recipe
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.space.search_space import space_of, with_settings

LADDER = {
    "several float32 micro-batches": {"training.gradient_accumulation_steps": 4},
    "bfloat16 with sums": {
        "model.dtype": "bfloat16",
        "optimizer.master": "split16",
        "optimizer.state": "8bit",
        "training.gradient_accumulation_steps": 4,
    },
    "recomputed": {"checkpointing.mode": "full", "training.mixed_precision": "bf16"},
    "in backward": {
        "model.dtype": "bfloat16",
        "optimizer.master": "split24",
        "optimizer.in_backward": True,
        "accumulation.order": "vertical",
        "checkpointing.mode": "full",
        "training.gradient_accumulation_steps": 4,
    },
    "streamed": {
        "model.dtype": "bfloat16",
        "optimizer.state": "bf16",
        "optimizer.in_backward": True,
        "accumulation.order": "vertical",
        "checkpointing.mode": "selective",
        "offload.optimizer": "host",
        "offload.parameters": "stream",
    },
    "wide micro-batches": {"training.per_device_train_batch_size": 4},
    "wide micro-batches in vertical order": {
        "model.dtype": "bfloat16",
        "optimizer.master": "none",
        "optimizer.in_backward": True,
        "accumulation.order": "vertical",
        "training.per_device_train_batch_size": 2,
        "training.gradient_accumulation_steps": 4,
    },
    "every other layer": {"checkpointing.mode": "selective", "checkpointing.every_n_layers": 2},
    "the model's own loss": {"loss.chunk_tokens": None, "training.mixed_precision": "bf16"},
    "the model's own loss in vertical order": {
        "loss.chunk_tokens": None,
        "model.dtype": "bfloat16",
        "optimizer.in_backward": True,
        "accumulation.order": "vertical",
        "checkpointing.mode": "full",
        "training.gradient_accumulation_steps": 4,
    },
    "adapters beside 4 bits": {
        "adapter.name": "lora",
        "model.dtype": "bfloat16",
        "model.quantization": "nf4",
    },
}


def shape_in(recipe) -> bounds.ModelShape:
    hf_config = load_model_config(recipe.model)
    return bounds.shape_of(model_on_meta(recipe.model, hf_config), 1024, hf_config.dtype)


@pytest.fixture(scope="module")
def shape(folder):
    return shape_in(load_recipe(None, [f"model={folder}", "model.weights=random"]))


@pytest.mark.parametrize("name", LADDER)
def test_of_a_rung(make_recipe, shape, name):
    recipe = make_recipe("training.gradient_accumulation_steps=1", "loss.chunk_tokens=256")
    assert_bounded(with_settings(recipe, LADDER[name]), shape)


def test_the_bound_of_the_host_leaves_little_open(make_recipe, shape):
    """Where the host is what lacks, bounds alone show it, without an estimate of each way to stream."""
    rung = LADDER["streamed"] | {"offload.activations": "inputs", "offload.resident_layers": 1}
    recipe = with_settings(make_recipe(), rung)
    estimate = assert_bounded(recipe, shape)
    without = bounds.parts_of(with_settings(recipe, {"offload.activations": "none"}), shape)
    parts = bounds.parts_of(recipe, shape)
    assert bounds.host_bytes(without) + parts["inputs"].host == bounds.host_bytes(parts)
    host_peak = estimate.host_peak_bytes - HOST_BYTES_WITH_CUDA
    assert bounds.host_bytes(parts) - HOST_BYTES_WITH_CUDA > 0.8 * host_peak


@pytest.mark.parametrize("name", ["recomputed", "every other layer", "the model's own loss", "in backward"])
def test_the_bound_of_the_device_leaves_little_open(name, tmp_path):
    """Or it would spare the search nothing. Weights, state and logits count here; in a small model the context does."""
    save_llama(
        tmp_path, layers=8, hidden=1024, inner=2816, heads=8, vocab_size=32_000, max_position_embeddings=1024
    )
    model = (f"model={tmp_path}", "model.weights=random", "data.max_length=512", "loss.chunk_tokens=256")
    recipe = with_settings(
        load_recipe(None, [*model, "training.gradient_accumulation_steps=1"]), LADDER[name]
    )
    shape = shape_in(recipe)
    estimate = assert_bounded(recipe, shape)
    assert (
        bounds.device_bytes(bounds.parts_of(recipe, shape), find_gpu(GPU))
        > 0.88 * estimate.process_peak_bytes
    )


@pytest.mark.slow
def test_of_combinations_at_random(make_recipe, shape):
    space = space_of(make_recipe(), num_layers=2, has_bfloat16=True)
    for combination in random.Random(0).sample(space.combinations, 30):
        assert_bounded(space.recipe_of(combination), shape)


def test_attention_that_draws_dropout_is_not_kept(tmp_path):
    """By selective checkpointing; here it would be eight times what the layers begin with."""
    save_llama(
        tmp_path, layers=24, hidden=64, inner=64, heads=8, head_dim=64, vocab_size=512, attention_dropout=0.1
    )
    recipe = load_recipe(
        None,
        [
            *(f"model={tmp_path}", "model.weights=random", "model.dtype=bfloat16", "data.max_length=512"),
            *("training.per_device_train_batch_size=16", "checkpointing.mode=selective"),
            *("optimizer.master=none", "loss.chunk_tokens=256"),
        ],
    )
    assert_bounded(recipe, shape_in(recipe))


def test_of_activations_those_count_that_backward_needs(make_recipe, shape):
    """Two layers of width 512, an MLP of 1024, 4096 logits; a row of 512 tokens in float32."""
    one = ["training.gradient_accumulation_steps=1", "loss.chunk_tokens=256"]
    rows_of_4 = [*one, "training.per_device_train_batch_size=4"]
    attention, mlp = 512 + 3 * 512 + 512, 3 * 1024 + 1024
    kept = 512 * 4 * 2 * (attention + mlp)
    begins = 512 * 4 * 2 * 512
    for settings, expected in (
        (one, kept),
        (rows_of_4, 4 * kept),
        ([*one, "loss.chunk_tokens=null"], kept + 512 * 4096 * 8),
        ([*one, "checkpointing.mode=full"], begins),
        ([*one, "checkpointing.mode=full", "checkpointing.every_n_layers=2"], (begins + kept) // 2),
        ([*one, "checkpointing.mode=selective"], begins),
        ([*one, "checkpointing.mode=full", "offload.activations=inputs"], 0),
        ([*one, "adapter.name=lora"], 0),
    ):
        assert bounds._activation_bytes(bounds.parts_of(make_recipe(*settings), shape)) == expected, settings


@pytest.mark.parametrize(
    "path, rung", [("offload.resident_layers", "streamed"), ("checkpointing.skip_last_layers", "recomputed")]
)
def test_a_number_of_layers_is_tried_from_the_most_memory_to_the_least(path, rung, make_recipe, shape):
    """Equally fast and equally costly choices are told apart by that order: the one that does least is taken."""
    deep, key = dataclasses.replace(shape, num_layers=64, widths=32 * shape.widths), recipe_keys()[path]
    recipes = [with_settings(make_recipe(), LADDER[rung] | {path: number}) for number in key.search_values]
    parts = [bounds.parts_of(recipe, deep) for recipe in recipes]
    needed = [bounds.weight_and_state_bytes(held) + bounds._activation_bytes(held) for held in parts]
    assert needed == sorted(needed, reverse=True)
    assert len(set(needed)) == len(key.search_values) > 1


def test_bounds_of_many_combinations_are_those_of_each(make_recipe, shape):
    """Each part is computed once for all combinations that agree in the knobs that state something of it."""
    recipe, gpu = (
        make_recipe("plan.allow=[qlora,bf16_sums,shorter_rows]", "training.max_grad_norm=1"),
        find_gpu(GPU),
    )
    space = space_of(recipe, num_layers=2, has_bfloat16=True)
    candidates = candidates_of(space, shape, gpu)
    for place in random.Random(0).sample(range(len(candidates)), 200):
        combination = space.combinations[place]
        one, least = space.recipe_of(combination), space.with_fewest_layers.recipe_of(combination)
        parts, least_parts = bounds.parts_of(one, shape), bounds.parts_of(least, shape)
        hosts = bounds.host_bytes(parts), bounds.host_bytes(least_parts)
        assert candidates.device_bytes_N[place] == with_headroom(bounds.device_bytes(least_parts, gpu))
        assert candidates.host_bytes_N[place] == with_headroom(min(hosts))
        assert candidates.seconds_N[place] == bounds.seconds(one, parts, shape, gpu)


def test_what_is_expected_of_many_combinations_is_what_is_expected_of_each(make_recipe, shape):
    """It is computed once for all that differ only in what a step's parts tell of them."""
    recipe, gpu = make_recipe("plan.allow=[qlora,bf16_sums]", "adapter.name=lora"), find_gpu(GPU)
    space = space_of(recipe, num_layers=2, has_bfloat16=True)
    candidates = candidates_of(space, shape, gpu)
    logs_N = prior_of(space, candidates, Limits(), shape, gpu).logs_N
    for place in random.Random(1).sample(range(len(candidates)), 100):
        combination = space.combinations[place]
        device, host = expected_bytes(space.with_fewest_layers.recipe_of(combination), shape, gpu)
        most = space.recipe_of(combination)  # all fit without limits
        seconds = expectations.seconds(most, shape, bounds.parts_of(most, shape), gpu)
        bound = candidates.device_bytes_N[place], candidates.host_bytes_N[place], candidates.seconds_N[place]
        for quantity, expected, least in zip(
            ("device_bytes", "host_bytes", "seconds"), (device, host, seconds), bound, strict=True
        ):
            floor = max(0.01 * least, 1e-4 if quantity == "seconds" else 2.0**20)
            assert math.isclose(np.exp(logs_N[quantity][place]), max(expected - least, floor)), quantity


def test_frozen_weights_that_stream_behind_products_are_expected_to_cost_no_seconds():
    """An estimate of it takes 2% more with 6 of its 32 layers streamed, and 8% more with 31."""

    def expected(*settings):
        still = ("model=mistral-7b-v0.3", "checkpointing.mode=none", "checkpointing.skip_last_layers=0")
        recipe = load_recipe("7b-lora", [*still, *settings])
        target = Target.of(recipe, "rtx-3090")
        return expectations.seconds(recipe, target.shape, bounds.parts_of(recipe, target.shape), target.gpu)

    streamed = expected("offload.parameters=stream", "offload.resident_layers=26")
    assert streamed == pytest.approx(expected(), rel=0.02)


def test_a_bound_of_other_weights_that_is_a_seventh_too_high_is_seen(tmp_path):
    """Of a table of positions, which belongs neither to the layers nor to embedding and head; it is frozen."""
    config = GPT2Config(n_embd=512, n_layer=2, n_head=8, n_positions=2**23, vocab_size=512)
    config.save_pretrained(tmp_path)
    recipe = load_recipe(
        None,
        [
            *(f"model={tmp_path}", "model.weights=random", "model.dtype=bfloat16", "adapter.name=lora"),
            *("data.max_length=64", "training.mixed_precision=bf16", "loss.chunk_tokens=64"),
            "training.gradient_accumulation_steps=1",
        ],
    )
    shape = shape_in(recipe)
    estimate = assert_bounded(recipe, shape)
    parts = bounds.parts_of(recipe, shape)
    too_high = {**parts, "rest": parts["rest"].scaled(1.15)}
    assert bounds.device_bytes(too_high, find_gpu(GPU)) > estimate.process_peak_bytes
