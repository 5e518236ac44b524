"""Strategy among what a plan chooses for several cards: which combinations there are, and their bounds."""

from __future__ import annotations

import dataclasses
import random

import pytest

from lowmem_ft.catalog.gpus import find_gpu
from lowmem_ft.estimator import estimate_memory
from lowmem_ft.estimator.runtime import model_on_meta
from lowmem_ft.models import load_model_config
from lowmem_ft.models.loading import weights_dtype
from lowmem_ft.planner import bounds
from lowmem_ft.planner.space import Space, space_of
from lowmem_ft.recipe.cards import on_cards

STILL = "plan.keep=[model,adapter,data,training,optimizer,offload,accumulation,loss,tiling,checkpointing]"


@pytest.fixture
def space_on_two(make_recipe):
    def make(*settings: str) -> Space:
        recipe, _ = on_cards(make_recipe(*settings), "2xl4", is_planned=True)
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
        held[config.strategy, config.reshards] = bounds.bytes_after_backward(recipe, shape)
    assert held["ddp", True] >= 16 * 10**9
    assert held["fsdp2", True] == held["fsdp2", False] == pytest.approx(held["ddp", True] / 2, rel=1e-3)


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


def assert_bounded(recipe, shape) -> None:
    gpu, estimate = find_gpu("l4"), estimate_memory(recipe, "l4")
    assert estimate.step is not None
    for name, bound, found in (
        ("device", bounds.device_bytes(recipe, shape, gpu), estimate.process_peak_bytes),
        ("host", bounds.host_bytes(recipe, shape), estimate.host_peak_bytes),
        ("seconds", bounds.seconds(recipe, shape, gpu), estimate.step.seconds),
    ):
        assert 0 < bound <= found, (name, bound, found, recipe.distributed)
