from __future__ import annotations

import numpy as np
import pytest

from lowmem_ft.planning.planner.search import most_layers
from lowmem_ft.planning.planner.search.estimated_needs import Limits, Need
from lowmem_ft.planning.planner.search.most_layers import with_most_layers
from lowmem_ft.recipe import Recipe, load_recipe

LIMITS = Limits(device_bytes=100.0, host_bytes=50.0)


def need(device: float, host: float = 0.0, seconds: float = 1.0, recipe: Recipe | None = None) -> Need:
    fits = device <= LIMITS.device_bytes and host <= LIMITS.host_bytes
    return Need(seconds=seconds, device_bytes=device, host_bytes=host, fits=fits, recipe=recipe)


@pytest.mark.parametrize("seed", range(60))
def test_the_most_layers_that_fit_are_found_in_few_estimates(seed):
    """The first layers may cost nothing, as the peak is elsewhere, and the later ones ever more."""
    draw = np.random.default_rng(seed)
    most = int(draw.integers(1, 100))
    free = draw.integers(0, most + 1)
    each = np.where(np.arange(most) < free, 0.0, draw.uniform(0.1, 8.0))
    each += draw.random() * (np.arange(most) > 0.8 * most)
    device_bytes = draw.uniform(1.0, 99.0) + np.concatenate([[0.0], np.cumsum(each)])
    asked: list[int] = []

    def need_at(number: int) -> Need:
        asked.append(number)
        return need(float(device_bytes[number]))

    expected = float(device_bytes[0]) * draw.uniform(0.8, 1.2), draw.uniform(0.0, 6.0)
    layers = most_layers._MostLayers(need_at=need_at, most=most, limits=LIMITS, expected=expected)
    found = layers.find()
    assert found == np.flatnonzero(device_bytes <= LIMITS.device_bytes)[-1]
    assert len(set(asked)) == len(asked) <= 10
    if found < most:
        assert LIMITS.device_bytes < layers.needed(found + 1).device_bytes <= device_bytes[found + 1] + 1e-9


def test_where_all_goes_as_expected_two_estimates_are_enough():
    """The first where memory should end, and one beside it."""
    asked: list[int] = []

    def need_at(number: int) -> Need:
        asked.append(number)
        return need(40.0 + 3.5 * number)

    layers = most_layers._MostLayers(need_at=need_at, most=90, limits=LIMITS, expected=(40.0, 3.5))
    assert layers.find() == 17
    assert asked == [17, 18]
    assert layers.least().device_bytes == 40.0


def streamed() -> Recipe:
    settings = ("adapter.name=lora", "offload.parameters=stream")
    layers = ("checkpointing.mode=full", "checkpointing.skip_last_layers=9", "offload.resident_layers=9")
    return load_recipe(None, ["model=any", *settings, *layers])


KEYS = ("checkpointing.skip_last_layers", "offload.resident_layers")


def test_weights_stay_before_activations_do_and_either_may_be_limited_by_the_host():
    def need_of(recipe: Recipe) -> Need:
        resident, skipped = recipe.offload.resident_layers, recipe.checkpointing.skip_last_layers
        device, host = 40.0 + 8 * resident + 3 * skipped, 10.0 * resident
        return need(device, host, seconds=20.0 - resident - skipped, recipe=recipe)

    def expected(recipe: Recipe) -> float:
        return 30.0 + 9 * recipe.offload.resident_layers + recipe.checkpointing.skip_last_layers

    found = with_most_layers(streamed(), KEYS, LIMITS, need_of, expected)
    assert found.recipe is not None
    assert found.recipe.offload.resident_layers == 5, "the host has room for no more"
    assert found.recipe.checkpointing.skip_last_layers == 6
    assert found.seconds == 9.0
    assert found.least is not None
    assert found.least.device_bytes == 40.0
    assert found.one_more is not None
    assert found.one_more.recipe is not None
    assert found.one_more.recipe.checkpointing.skip_last_layers == 7
    assert not found.one_more.fits


def test_where_not_one_layer_fits_the_needs_are_those_of_none():
    asked: list[Recipe] = []

    def need_of(recipe: Recipe) -> Need:
        asked.append(recipe)
        return need(101.0 + recipe.offload.resident_layers, recipe=recipe)

    found = with_most_layers(streamed(), KEYS, LIMITS, need_of, lambda recipe: 101.0)
    assert not found.fits
    assert found.recipe is not None
    assert (found.recipe.offload.resident_layers, found.recipe.checkpointing.skip_last_layers) == (0, 0)
    assert len(asked) == 1


def test_where_all_layers_fit_there_is_none_more():
    found = with_most_layers(
        streamed(), KEYS, LIMITS, lambda recipe: need(10.0, recipe=recipe), lambda recipe: 9.0
    )
    assert found.recipe == streamed()
    assert found.one_more is None
