"""A technique that nobody has heard of joins by its config and one entry in build.py.

It then trains, is in the estimate, and has what its key states in ``effects``: rules, and a place in the search.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest
import torch
from measuring.real_run import run_for_real
from torch import Tensor, nn

from lowmem_ft.foundation.errors import RecipeError
from lowmem_ft.foundation.knob import Effect, knob
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.estimator.traces.tracing import NUM_STEPS
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.recipe.reading import keys, loading
from lowmem_ft.recipe.space.search_space import planned_keys
from lowmem_ft.techniques.modules.patching import wrap_method
from lowmem_ft.techniques.technique import Technique
from lowmem_ft.training import enabled_techniques

ALLOWED_ERROR = 0.005
"""As of runs without it: tests/planning/estimator/test_against_real_steps.py."""


@dataclass(frozen=True, kw_only=True)
class HalvesConfig:
    kept: Literal["whole", "halves"] = knob(
        "whole",
        "What backward needs of float32 activations.",
        frees="halves: half of the activations",
        costs="halves: they are rounded",
        effects={
            "halves": Effect(fidelity="unbiased rounding", engines=("fsdp2",), traits=("no loss scale",)),
        },
        tries=("whole", "halves"),
    )


@dataclass(frozen=True, kw_only=True)
class RecipeWithHalves(Recipe):
    halves: HalvesConfig = field(default_factory=HalvesConfig)


class HalvedActivations(Technique):
    """What backward needs waits as bfloat16. It has something to ask of a loop, too: how many micro-batches come."""

    num_micro_batches = 0

    def before_forward(self, input_ids_BT, num_label_tokens):
        self.num_micro_batches += 1
        return {}


def enable_halved_activations(model: nn.Module) -> HalvedActivations:
    def pack(tensor: Tensor) -> Tensor | tuple[Tensor, torch.dtype]:
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if is_weight or tensor.dtype != torch.float32 or tensor.dim() < 2:
            return tensor
        return tensor.to(torch.bfloat16), tensor.dtype

    def unpack(packed) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[0].to(packed[1])

    def halved(forward):
        def with_halves(*args, **kwargs):
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return forward(*args, **kwargs)

        return with_halves

    return HalvedActivations(wrap_method(model, "forward", halved))


SETTINGS = [
    "training.use_cpu=true",
    "checkpointing.mode=none",
    "data.eval_size=null",
    "training.eval_steps=null",
    "training.gradient_accumulation_steps=1",
]


@pytest.fixture
def on(monkeypatch):
    """The technique is registered; what comes is the list of those that were enabled since."""
    for module in (keys, loading):
        monkeypatch.setattr(module, "Recipe", RecipeWithHalves)
    enabled = []

    def enable(build):
        enabled.append(enable_halved_activations(build.model))
        return enabled[-1]

    one_more = enabled_techniques.Spec(lambda build: build.recipe.halves.kept == "halves", enable)
    monkeypatch.setattr(enabled_techniques, "FORWARD", (*enabled_techniques.FORWARD, one_more))
    caches = (keys.recipe_groups, keys.recipe_keys)
    for cache in caches:
        cache.cache_clear()
    yield enabled
    for cache in caches:
        cache.cache_clear()


def test_a_technique_that_joins_a_run_is_estimated_as_it_is_measured(on):
    recipe = load_recipe("tiny", SETTINGS)
    without = max(run_for_real(recipe, num_steps=NUM_STEPS).allocated.values())
    assert not on
    recipe = load_recipe("tiny", [*SETTINGS, "halves.kept=halves"])
    estimated = estimate_memory(recipe, "cpu").allocated_peak_bytes
    measured = max(run_for_real(recipe, num_steps=NUM_STEPS).allocated.values())
    assert estimated == pytest.approx(measured, rel=ALLOWED_ERROR)
    assert measured < 0.9 * without
    assert len(on) >= 2  # traced, and run
    assert all(technique.num_micro_batches == NUM_STEPS for technique in on)


@pytest.mark.parametrize(
    "setting, problem",
    [
        (
            "distributed.strategy=ddp",
            "halves.kept=halves works in one process, or with distributed.strategy=fsdp2",
        ),
        (
            "training.mixed_precision=fp16",
            "halves.kept=halves of trained weights needs training.mixed_precision=no",
        ),
    ],
)
def test_rules_know_what_its_effects_state(on, setting, problem):
    load_recipe("tiny", [setting])
    with pytest.raises(RecipeError, match=problem):
        load_recipe("tiny", ["halves.kept=halves", setting])


def test_a_plan_tries_it(on):
    assert "halves.kept" in {key.path for key in planned_keys(load_recipe("tiny"))}
