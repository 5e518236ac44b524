"""Plans of a small model in small random spaces, against every combination there, estimated in full."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import random

import pytest
from tiny_models import save_llama

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.planning.planner import plan
from lowmem_ft.planning.planner.plan_target import Target
from lowmem_ft.planning.planner.search.best_found import NEARLY_AS_FAST
from lowmem_ft.recipe import check_recipe, load_recipe
from lowmem_ft.recipe.space.search_space import asks_consent, planned_keys, space_of

GPUS = ("rtx-3070", "rtx-3090", "a100-40gb", "h100-80gb", "t4")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_a_plan_is_the_simplest_of_the_fastest_and_more_memory_is_never_slower(seed, tmp_path, monkeypatch):
    monkeypatch.setenv("LOWMEM_FT_TRACE_CACHE", str(tmp_path / "traces"))
    monkeypatch.setenv("LOWMEM_FT_TRACE_PROCESSES", "1")
    save_llama(
        tmp_path / "model",
        layers=2,
        hidden=512,
        inner=1536,
        heads=8,
        num_key_value_heads=4,
        vocab_size=8192,
        max_position_embeddings=1024,
    )
    draw = random.Random(seed)
    gpu = find_gpu(draw.choice(GPUS))
    recipe, space, enough_for_one = small_space(draw, tmp_path / "model", gpu)
    before = float("inf")
    for times in (1.0, 1.3, 2.0):
        device_bytes = min(math.ceil(times * enough_for_one.device_bytes), gpu.available_bytes)
        budget = Budget(device=f"{device_bytes}B", host=f"{math.ceil(enough_for_one.host_bytes)}B")
        asked = dataclasses.replace(recipe, budget=budget)
        fitting = [(need, changes) for need, changes in all_needs(space, Target.of(asked, gpu)) if need.fits]
        chosen = plan(asked, budget, gpu)
        assert chosen.fits
        seconds = chosen.estimate.step.seconds
        enough = (1 + NEARLY_AS_FAST) * min(need.seconds for need, _ in fitting)
        assert seconds <= min(enough, before)
        alike = [
            changes
            for need, changes in fitting
            if need.seconds <= enough and not is_slower_than_with_less(need, seconds, fitting)
        ]
        assert complexity_of(chosen.recipe, space) <= min(alike)
        before = seconds


def small_space(draw, model, gpu):
    """Return a recipe with some drawn values, its space of at most twenty combinations, and the needs of one."""
    given = [f"model={model}", "model.weights=random", "data.max_length=256"]
    planned = [key for key in planned_keys(load_recipe(None, given)) if key.search_values]
    keys = [key for key in planned if not asks_consent(key)]
    while True:
        free = draw.sample(keys, draw.randint(1, 3))
        values = [
            key.setting(draw.choice(key.search_values))
            for key in keys
            if key not in free and draw.random() < 0.3
        ]
        rows = f"training.gradient_accumulation_steps={draw.choice((1, 2, 4))}"
        kept = ",".join(key.path for key in planned if key not in free)
        with contextlib.suppress(UserError):
            recipe = load_recipe(None, [*given, rows, *values, f"plan.keep=[{kept}]"])
            check_recipe(recipe)
            target = Target.of(recipe, gpu)
            num_layers, rules = target.shape.num_layers, target.rules
            space = space_of(recipe, num_layers=num_layers, has_bfloat16=target.has_bfloat16, rules=rules)
            if 4 <= len(space.combinations) <= 20 and (
                needs := [need for need, _ in all_needs(space, target)]
            ):
                return recipe, space, draw.choice(needs)


def all_needs(space, target):
    """Yield the needs of each combination that can be built, and how much it changes."""
    for combination in space.combinations:
        with contextlib.suppress(UserError):
            need = target.need(space.recipe_of(combination), space.counted(combination))
            yield need, space.complexity(combination)


def is_slower_than_with_less(need, seconds, fitting):
    """Check whether something is slower than the plan, and than what would be chosen with less memory."""
    return need.seconds > seconds and any(
        less.seconds < need.seconds
        and (less.device_bytes < need.device_bytes or less.host_bytes < need.host_bytes)
        for less, _ in fitting
    )


def complexity_of(recipe, space):
    """Return how much a recipe changes, by the choices of a space that it has; counted ones may have any number."""

    def has(combination):
        counted = space.counted(combination)
        return all(
            operator.attrgetter(key)(recipe) == value or key in counted
            for key, value in space.settings(combination).items()
        )

    return min(space.complexity(combination) for combination in space.combinations if has(combination))
