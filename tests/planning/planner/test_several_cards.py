"""Strategy among what a plan chooses for several cards: which combinations there are, and their bounds."""

from __future__ import annotations

import dataclasses
import random
import re

import pytest
from planner_bounds import assert_bounded

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.units import GIB
from lowmem_ft.models.hf_config import load_model_config, weights_dtype
from lowmem_ft.planning.estimator.runtime import model_on_meta
from lowmem_ft.planning.planner import bounds, plan
from lowmem_ft.planning.planner.rows_per_gpu import numbers_up_to, on_number
from lowmem_ft.recipe import load_recipe
from lowmem_ft.recipe.gpu_count import on_gpus
from lowmem_ft.recipe.space.search_space import Space, space_of

STILL = "plan.keep=[model,adapter,data,training,optimizer,offload,accumulation,loss,tiling,checkpointing]"


@pytest.fixture
def space_on_two(make_recipe):
    def make(*settings: str) -> Space:
        recipe, _ = on_gpus(make_recipe(*settings), "2xl4", is_planned=True)
        return space_of(recipe, num_layers=2, has_bfloat16=True)

    return make


def ways(space: Space) -> set[tuple]:
    """Strategy, whether weights are gathered again, whether they wait on the host."""
    configs = [space.recipe_of(combination).distributed for combination in space.combinations]
    return {(config.strategy, config.reshards, bool(config.cpu_offload)) for config in configs}


def test_ways_to_share_a_model_that_is_open(space_on_two):
    space = space_on_two(STILL)
    assert ways(space) == {
        ("ddp", True, False),
        ("fsdp2", True, False),
        ("fsdp2", False, False),
    }
    own = space.recipe_of(space.own).distributed
    assert (own.strategy, own.reshards, own.cpu_offload, own.num_processes) == ("fsdp2", True, None, 2)


def test_what_a_recipe_says_of_it_stays(space_on_two):
    assert {strategy for strategy, _, _ in ways(space_on_two(STILL, "distributed.strategy=ddp"))} == {"ddp"}
    gathered = ways(space_on_two(STILL, "distributed.reshard_after_forward=true"))
    assert {reshards for _, reshards, _ in gathered} == {True}
    held = STILL.replace("]", ",distributed]")
    assert ways(space_on_two(held)) == {("fsdp2", True, False)}


def test_of_one_process_nothing_is_to_be_shared(make_recipe):
    space = space_of(make_recipe(), num_layers=2, has_bfloat16=True)
    assert not [key for each in space.dimensions for key in each.keys if key.startswith("distributed.")]


def test_a_strategy_excludes_what_its_engine_refuses(space_on_two):
    """Adafactor measures whole parameters, which only ddp has."""
    assert {way[0] for way in ways(space_on_two(STILL, "optimizer.name=adafactor"))} == {"ddp"}


def test_rows_wait_on_the_host_where_a_recipe_says_so(space_on_two):
    """A plan does not choose it: no GPU has shown it yet. Weights that stay gathered would take back what it frees."""
    assert ways(space_on_two(STILL, "distributed.cpu_offload=true")) == {("fsdp2", True, True)}


def test_a_process_holds_its_part_of_a_large_model(space_on_two):
    """By fsdp2 on two, half of weights, gradients and state; all weights besides where they stay gathered."""
    space = space_on_two(STILL)
    shape = dataclasses.replace(shape_in(space.recipe), parameters=10**9)
    held = {}
    for combination in space.combinations:
        recipe = space.recipe_of(combination)
        config = recipe.distributed
        parts = bounds.parts_of(recipe, shape)
        held[config.strategy, config.reshards] = bounds.weight_and_state_bytes(parts) + bounds.gradient_bytes(
            parts
        )
    assert held["ddp", True] >= 16 * 10**9
    assert held["fsdp2", True] == held["fsdp2", False] == pytest.approx(held["ddp", True] / 2, rel=1e-3)


def test_weights_that_stay_gathered_are_those_of_all_layers(space_on_two):
    """They are counted, not compared with an estimate, which has copies of them that no bound counts."""
    space = space_on_two(STILL, "model.dtype=bfloat16", "optimizer.master=split16")
    shape = shape_in(space.recipe)
    gathered = {}
    for combination in space.combinations:
        recipe = space.recipe_of(combination)
        config = recipe.distributed
        gathered[config.strategy, config.reshards] = bounds.parts_of(recipe, shape)["gathered"].device
    assert gathered == {
        ("ddp", True): 0,
        ("fsdp2", True): 0,
        ("fsdp2", False): 2 * shape.layer_parameters,
    }


@pytest.mark.parametrize(
    "settings",
    [[], ["model.dtype=bfloat16", "optimizer.master=split16"], ["distributed.cpu_offload=true"]],
    ids=["float32", "split16", "on-host"],
)
def test_bounds_hold_for_each_way(space_on_two, settings):
    space = space_on_two(STILL, "loss.chunk_tokens=256", *settings)
    shape = shape_in(space.recipe)
    for combination in space.combinations:
        assert_bounded(space.recipe_of(combination), shape)


@pytest.mark.slow
def test_bounds_hold_for_combinations_at_random(space_on_two):
    space = space_on_two()
    shape = shape_in(space.recipe)
    for combination in random.Random(0).sample(space.combinations, 30):
        assert_bounded(space.recipe_of(combination), shape)


def shape_in(recipe) -> bounds.ModelShape:
    hf_config = load_model_config(recipe.model)
    return bounds.shape_of(
        model_on_meta(recipe.model, hf_config), 512, weights_dtype(recipe.model, hf_config)
    )


KNOWN = "plan.keep=[model,training.mixed_precision,optimizer,offload,tiling,loss,accumulation,checkpointing]"
"""Leaves the strategy and micro-batches to choose."""


def made_up_gib(recipe) -> float:
    """A model of 12 GiB, of which each process of fsdp2 has its part, and 1 GiB for each row."""
    config = recipe.distributed
    share = 1 if config.strategy in (None, "none", "ddp") else config.num_processes
    gathered = 4 if config.strategy == "fsdp2" and not config.reshards else 0
    return 12 / share + gathered + recipe.training.per_device_train_batch_size


@pytest.mark.parametrize("device_gib, number", [(16, 1), (9, 2), (6, 4), (3.5, 8)])
def test_the_fewest_cards_that_do_share_the_rows_of_a_step(make_recipe, at_once, device_gib, number):
    at_once(made_up_gib)
    recipe = make_recipe(KNOWN, "training.gradient_accumulation_steps=8")
    result = plan(recipe, Budget(device=f"{device_gib}GiB"), "l4", max_gpus=8)
    assert result.fits
    assert result.num_gpus == number
    assert result.too_few_gpus == tuple(fewer for fewer in (1, 2, 4) if fewer < number)
    training = result.recipe.training
    assert training.per_device_train_batch_size * training.gradient_accumulation_steps * number == 8
    settings = [*settings_of(recipe), *result.settings]
    assert load_recipe(None, settings).distributed.num_processes == (None if number == 1 else number)


def settings_of(recipe) -> list[str]:
    return [f"model={recipe.model.name_or_path}", "model.weights=random", "data.max_length=512"]


def test_what_they_change_stands_beside_the_recipe_that_was_asked_for(make_recipe, at_once):
    at_once(made_up_gib, seconds=lambda recipe: 9 - recipe.training.per_device_train_batch_size)
    recipe = make_recipe(KNOWN, "training.gradient_accumulation_steps=8")
    result = plan(recipe, Budget(device="9GiB"), "l4", max_gpus=8)
    shared = {"distributed.num_processes": 2, "distributed.strategy": "fsdp2"}
    assert result.overrides == {
        **shared,
        "training.per_device_train_batch_size": 2,
        "training.gradient_accumulation_steps": 2,
    }
    for other in (*result.alternatives, *result.rejected, *result.purchases):
        assert other.overrides["distributed.num_processes"] == 2


def test_more_cards_go_before_what_is_given_up(make_recipe, at_once):
    """LoRA would do on one card."""
    at_once(lambda recipe: 1.0 if recipe.adapter.name == "lora" else made_up_gib(recipe))
    kept = KNOWN.replace("model,", "")
    recipe = make_recipe(kept, "plan.allow=[lora]", "training.gradient_accumulation_steps=8")
    several = plan(recipe, Budget(device="6GiB"), "l4", max_gpus=4)
    assert (several.num_gpus, several.given_up) == (4, ())
    fewer = plan(recipe, Budget(device="6GiB"), "l4", max_gpus=2)
    assert (fewer.num_gpus, fewer.given_up) == (1, ("lora",))


def test_where_no_number_does_it_says_what_the_nearest_lacks(make_recipe, at_once):
    at_once(lambda recipe: 20 + made_up_gib(recipe))
    result = plan(make_recipe(KNOWN), Budget(device="6GiB"), "l4", max_gpus=4)
    assert not result.fits
    assert result.num_gpus == 4
    assert 15 * GIB < result.missing_device_bytes < 20 * GIB


def test_cards_that_cannot_divide_the_rows_are_left_out(make_recipe):
    odd = make_recipe("training.gradient_accumulation_steps=6")
    assert numbers_up_to(8, odd) == (1, 2)
    wide = make_recipe("training.gradient_accumulation_steps=1", "training.per_device_train_batch_size=4")
    assert numbers_up_to(8, wide) == (1, 2, 4)
    config = on_number(wide, 4).training
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps) == (1, 1)


@pytest.mark.parametrize(
    "settings, gpu, max_gpus, says",
    [
        ([], "l4", 3, "max_gpus (--max-gpus) is 1, 2, 4 or 8, got 3. Set it to 8"),
        (["distributed.num_processes=2"], "l4", 4, "distributed.num_processes=2. Leave these out"),
        (["plan.keep=[training]"], "l4", 4, "share the rows of a step, and plan.keep holds training"),
        ([], "cpu", 4, "max_gpus needs a GPU, and this plan is for a processor"),
    ],
)
def test_a_number_that_cannot_be_searched_for_is_refused(make_recipe, settings, gpu, max_gpus, says):
    with pytest.raises(UserError, match=re.escape(says)):
        plan(make_recipe(*settings), None, gpu, max_gpus=max_gpus)
