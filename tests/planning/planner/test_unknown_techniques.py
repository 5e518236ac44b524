"""A technique that does not state what it remaining_bytes of a step's memory: nothing is called proven against it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
from tiny_models import save_llama
from torch import nn
from transformers import PreTrainedModel

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.knob import Effect, knob
from lowmem_ft.foundation.memory.least_memory import NOTHING
from lowmem_ft.foundation.memory.uncertainty import with_headroom
from lowmem_ft.optimizers.config import OptimizerConfig
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.planner import bounds, plan
from lowmem_ft.planning.planner.plan_target import Target
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.recipe.reading import keys
from lowmem_ft.techniques.technique import Technique
from lowmem_ft.training.step import enabled_techniques

GPU = "l4"

STATED = {"gradients": lambda held, value, step: NOTHING if value else held}
STATED["state"] = STATED["gradients"]


def config_with(remaining_bytes) -> type[OptimizerConfig]:
    @dataclass(frozen=True, kw_only=True)
    class SparseOptimizerConfig(OptimizerConfig):
        """An optimizer that may train the head alone, as methods do that train some layers at a time."""

        sheds_gradients: bool = knob(
            False,
            "Drop each gradient but the head's as soon as backward has finished it.",
            frees="gradients",
            effects={True: Effect(cost="time")},
            search_values=(False, True),
            remaining_bytes=remaining_bytes,
        )

    return SparseOptimizerConfig


def enable_shed_gradients(model: PreTrainedModel) -> Technique:
    def shed(parameter: nn.Parameter) -> None:
        parameter.grad = None

    head = model.lm_head.weight
    hooks = [
        parameter.register_post_accumulate_grad_hook(shed)
        for parameter in model.parameters()
        if parameter is not head
    ]
    return Technique(*(hook.remove for hook in hooks))


@pytest.fixture
def join(monkeypatch):
    """Let the technique join, with what its knob states, as a file of its own would."""

    def forget() -> None:
        keys.recipe_groups.cache_clear()
        keys.recipe_keys.cache_clear()

    def joined(remaining_bytes) -> None:
        monkeypatch.setitem(Recipe.__annotations__, "optimizer", config_with(remaining_bytes))
        forget()

    one_more = enabled_techniques.Spec(
        lambda build: build.recipe.optimizer.sheds_gradients,
        lambda build: enable_shed_gradients(build.model),
    )
    monkeypatch.setattr(enabled_techniques, "FORWARD", (*enabled_techniques.FORWARD, one_more))
    yield joined
    monkeypatch.undo()
    forget()


@pytest.fixture
def model(tmp_path) -> str:
    """Most of what a step of it needs is weights, state and gradients of its layers."""
    return save_llama(
        tmp_path, layers=6, hidden=1024, inner=2816, heads=8, vocab_size=4096, max_position_embeddings=1024
    )


def only_the_new_knob(model: str) -> Recipe:
    groups = set(keys.recipe_groups()) - {"optimizer", "plan", "budget"}
    others = [path for path in keys.recipe_keys() if path.startswith("optimizer.") and "sheds" not in path]
    settings = ["model.weights=random", "data.max_length=256", "checkpointing.mode=full"]
    keep = f"plan.keep=[{','.join([*sorted(groups), *others])}]"
    return load_recipe(None, [f"model={model}", *settings, keep])


def with_the_technique(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, sheds_gradients=True))


def test_what_it_does_not_state_is_not_proven_not_to_fit(join, model):
    join(None)
    recipe = only_the_new_knob(model)
    shape, gpu = Target.of(recipe, GPU).shape, find_gpu(GPU)
    needed = with_headroom(estimate_memory(with_the_technique(recipe), GPU).process_peak_bytes)
    least_without = with_headroom(bounds.device_bytes(bounds.parts_of(recipe, shape), gpu))
    assert needed < least_without, "the bound of a step without it does not hold with it"
    assert set(bounds.parts_of(with_the_technique(recipe), shape).values()) == {NOTHING}
    assert bounds.product_seconds(with_the_technique(recipe), shape, gpu) == 0.0
    result = plan(recipe, Budget(device=f"{int((needed + least_without) / 2)}B", host="32GiB"), GPU)
    assert result.fits
    assert result.overrides == {"optimizer.sheds_gradients": True}
    assert (result.counts.estimated, result.counts.beyond_bytes) == (1, 1)
    assert result.is_proven


def test_what_it_states_is_a_bound_again(join, model):
    join(STATED)
    recipe = only_the_new_knob(model)
    shape = Target.of(recipe, GPU).shape
    plain, parts = bounds.parts_of(recipe, shape), bounds.parts_of(with_the_technique(recipe), shape)
    assert {part for part in parts if parts[part] != plain[part]} == {"gradients", "state"}
    assert parts["gradients"] == parts["state"] == NOTHING
    assert bounds.unknown_knobs() == []
