"""What memory knobs say of themselves, for rules, remediations and tables to read."""

from __future__ import annotations

import dataclasses

import pytest

from lowmem_ft.foundation.knob import NO_EFFECT, Effect, knob
from lowmem_ft.recipe import load_recipe
from lowmem_ft.recipe.reading.keys import recipe_keys

MEMORY_KNOBS = [path for path, key in recipe_keys().items() if key.effects is not None]


def test_there_are_memory_knobs_in_every_part_that_has_them():
    groups = {path.partition(".")[0] for path in MEMORY_KNOBS}
    assert groups >= {"model", "adapter", "training", "optimizer", "checkpointing", "offload", "accumulation"}
    assert groups >= {"loss", "tiling"}


@pytest.mark.parametrize("path", MEMORY_KNOBS)
def test_a_memory_knob_says_in_words_what_it_frees_or_costs(path):
    key = recipe_keys()[path]
    assert key.frees or key.costs


@pytest.mark.parametrize("path", [path for path in MEMORY_KNOBS if recipe_keys()[path].choices])
def test_every_choice_but_the_plain_one_has_an_effect(path):
    key = recipe_keys()[path]
    assert {*key.effects} >= {*key.choices} - {key.default, "none"}
    assert {*key.effects} <= {*key.choices}


def test_an_effect_holds_for_its_value_or_for_all_but_the_one_that_is_off():
    keys = recipe_keys()
    assert keys["offload.optimizer"].effect_of("host").cost == "host link"
    assert keys["offload.optimizer"].effect_of("device") == NO_EFFECT
    assert {keys["tiling.mlp"].effect_of(pieces).cost for pieces in (2, 8)} == {"time"}
    assert keys["tiling.mlp"].effect_of(1) == NO_EFFECT
    assert keys["offload.folder"].effect_of(None) == NO_EFFECT
    assert keys["training.seed"].effect_of(7) == NO_EFFECT
    assert keys["training.lr_scheduler_kwargs"].effect_of({"min_lr_rate": 0.1}) == NO_EFFECT


def test_state_in_several_formats_has_the_effect_of_the_one_that_rounds():
    state = recipe_keys()["optimizer.state"]
    assert state.effect_of({"exp_avg": "bf16", "exp_avg_sq": "fp32"}) == state.effect_of("bf16") != NO_EFFECT
    assert state.effect_of({"exp_avg": "fp32"}) == state.effect_of({}) == NO_EFFECT


def test_a_change_gives_up_only_what_was_not_given_up_before():
    name, length = (recipe_keys()[path] for path in ("optimizer.name", "data.max_length"))
    exact = load_recipe(None, ["model=any", "optimizer.name=adamw", "data.max_length=1024"])
    lion = load_recipe(None, ["model=any", "optimizer.name=lion"])
    assert name.effect_of_change(exact, "lion").fidelity == "other mathematics"
    assert name.effect_of_change(lion, "sgd").fidelity == "exact"
    assert name.effect_of_change(exact, "adamw") == NO_EFFECT
    assert length.effect_of_change(exact, 512).fidelity == "other mathematics"  # each cut is one more
    assert length.effect_of_change(exact, 1024) == NO_EFFECT


def test_a_knob_that_is_named_after_layers_says_whether_it_counts_them():
    named = {path for path in recipe_keys() if "layers" in path}
    assert named
    assert {path for path, key in recipe_keys().items() if key.counts_layers} == named


def test_a_field_carries_what_its_knob_was_given():
    effects = {"b": Effect(cost="time")}
    field = knob("a", "What it does.", frees="bytes", effects=effects, counts_layers="last")
    assert isinstance(field, dataclasses.Field)
    assert (field.default, field.metadata["frees"], field.metadata["effects"]) == ("a", "bytes", effects)
    assert knob([1], "A list.").default_factory() == [1]
