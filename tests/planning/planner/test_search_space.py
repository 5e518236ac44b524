from __future__ import annotations

import itertools
import random

import pytest

from lowmem_ft.foundation.knob import Effect
from lowmem_ft.recipe.plan_config import INCLUDED, Consent
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.rules.conflicts import CONFLICTS, recipe_problems
from lowmem_ft.recipe.space.search_space import ROWS, consent_keys, recipe_rules, space_of, with_settings
from lowmem_ft.recipe.tree import Recipe


def settings_at_random(draw: random.Random) -> dict:
    return {key.path: draw.choice(key.search_values) for key in recipe_keys().values() if key.search_values}


def test_combinations_are_exactly_those_that_the_recipe_allows(make_recipe):
    kept = "optimizer,tiling,loss,training.mixed_precision,accumulation,checkpointing.mlp_activation"
    recipe = make_recipe(f"plan.keep=[{kept}]")
    space = space_of(recipe, num_layers=2, has_bfloat16=True)
    valid = {tuple(sorted(space.settings(combination).items())) for combination in space.combinations}
    assert len(valid) == len(space.combinations) > 50
    assert all(not recipe_problems(space.recipe_of(combination)) for combination in space.combinations[::7])
    draw, num_invalid = random.Random(0), 0
    for _ in range(300):
        settings = {}
        for dimension in space.dimensions:
            settings |= draw.choice(dimension.choices)
        is_valid = not recipe_problems(with_settings(recipe, settings))
        assert is_valid == (tuple(sorted(settings.items())) in valid), settings
        num_invalid += not is_valid
    assert 0 < num_invalid < 300
    total = 1
    for dimension in space.dimensions:
        total *= len(dimension.choices)
    assert len(space.combinations) + sum(space.refused.values()) == total


def test_activations_are_recomputed_only_where_whole_mlps_are_not(make_recipe):
    space = space_of(make_recipe("plan.keep=[optimizer,loss,offload]"), num_layers=6, has_bfloat16=True)
    tried = {
        (recipe.checkpointing.checkpointed, recipe.tiling.mlp > 1)
        for recipe in map(space.recipe_of, space.combinations)
        if recipe.checkpointing.mlp_activation == "recompute"
    }
    assert tried == {("no layer", False), ("some layers", False)}


@pytest.mark.parametrize("own", ["no", "bf16"])
def test_autocast_is_not_tried_where_the_weights_are_what_it_casts_to(make_recipe, own):
    recipe = make_recipe(f"training.mixed_precision={own}", "plan.keep=[optimizer,tiling,loss,offload]")
    space = space_of(recipe, num_layers=2, has_bfloat16=True)
    chosen = [space.settings(combination) for combination in space.combinations]
    tried = {(each["model.dtype"], each["training.mixed_precision"]) for each in chosen}
    assert tried == {("float32", "no"), ("float32", "bf16"), ("bfloat16", own)}


def test_autocast_is_tried_beside_adapters_which_are_float32(make_recipe):
    space = space_of(
        make_recipe("plan.keep=[tiling,offload]", "plan.allow=[lora]"), num_layers=2, has_bfloat16=True
    )
    chosen = [space.settings(combination) for combination in space.combinations]
    tried = {(one["adapter.name"], one["model.dtype"], one["training.mixed_precision"]) for one in chosen}
    assert ("lora", "bfloat16", "bf16") in tried
    assert ("lora", "bfloat16", "no") in tried
    assert ("none", "bfloat16", "bf16") not in tried


def test_vertical_order_is_not_tried_with_a_single_micro_batch(make_recipe):
    space = space_of(
        make_recipe("plan.keep=[optimizer,tiling,loss,offload]"), num_layers=2, has_bfloat16=True
    )
    chosen = [space.settings(combination) for combination in space.combinations]
    tried = {(each[ROWS[1]], each["accumulation.order"]) for each in chosen}
    assert tried == {(1, "horizontal"), *itertools.product((2, 4), ("horizontal", "vertical"))}
    keys = [dimension.keys for dimension in space.dimensions]
    order, single = keys.index(("accumulation.order",)), space.dimensions[keys.index(ROWS)].choices
    idle = list(space.own)
    idle[order] = [choice["accumulation.order"] for choice in space.dimensions[order].choices].index(
        "vertical"
    )
    idle[keys.index(ROWS)] = [choice[ROWS[1]] for choice in single].index(1)
    assert "gains nothing with a single micro-batch" in space.refusal(tuple(idle))


def test_sums_inside_products_are_tried_where_16_bit_gradients_are_summed(make_recipe):
    space = space_of(
        make_recipe("plan.keep=[optimizer,tiling,loss,offload,checkpointing]"),
        num_layers=2,
        has_bfloat16=True,
    )
    chosen = [space.settings(combination) for combination in space.combinations]
    where = {(one["model.dtype"], one[ROWS[1]]) for one in chosen if one["accumulation.fusion"]}
    assert where == {("bfloat16", 2), ("bfloat16", 4)}
    assert where < {(one["model.dtype"], one[ROWS[1]]) for one in chosen if not one["accumulation.fusion"]}


def test_the_rows_of_a_step_stay(make_recipe):
    space = space_of(make_recipe("training.per_device_train_batch_size=3"), num_layers=2, has_bfloat16=True)
    (rows,) = [dimension for dimension in space.dimensions if dimension.keys == ROWS]
    cut = [tuple(choice.values()) for choice in rows.choices]
    assert cut == [(12, 1), (6, 2), (4, 3), (3, 4), (2, 6), (1, 12)]
    assert cut[rows.own] == (3, 4)


def test_a_rule_reads_no_key_that_it_does_not_name(make_recipe):
    """Or a combination would be refused, or let through, by what a rule said of another."""
    draw, recipe, num_told = random.Random(1), make_recipe(), 0
    for rule in recipe_rules():
        for _ in range(60):
            settings, others = settings_at_random(draw), settings_at_random(draw)
            other = {key: (settings if rule.reads(key) else others)[key] for key in settings}
            said = [list(rule.problems(with_settings(recipe, values))) for values in (settings, other)]
            assert bool(said[0]) == bool(said[1]), (rule.keys, settings, other)
            num_told += bool(said[0])
    assert num_told > 100


def test_what_is_kept_is_no_dimension(make_recipe):
    recipe = make_recipe("plan.keep=[optimizer,checkpointing.mode,training.per_device_train_batch_size]")
    space = space_of(recipe, num_layers=2, has_bfloat16=True)
    keys = {key for dimension in space.dimensions for key in dimension.keys}
    assert not {key for key in keys if key.startswith("optimizer.")} | keys & {"checkpointing.mode", *ROWS}
    assert "offload.optimizer" in keys


def test_mathematics_is_given_up_with_consent_alone(make_recipe):
    def values(key: str, *settings: str) -> set:
        space = space_of(make_recipe(*settings), num_layers=2, has_bfloat16=True)
        return {space.settings(combination).get(key) for combination in space.combinations}

    keep = "plan.keep=[training,checkpointing,offload,tiling,loss,accumulation]"
    assert values("optimizer.master", keep) == {"fp32", "split16", "split24"}
    assert values("optimizer.master", keep, "plan.allow=[plain_bf16]") == {
        "fp32",
        "split16",
        "split24",
        "none",
    }
    assert values("adapter.name", keep) == {None}
    assert values("data.max_length", keep, "data.max_length=1024", "plan.allow=[shorter_rows]") == {1024, 512}
    space = space_of(make_recipe(keep, "plan.allow=[qlora]"), num_layers=2, has_bfloat16=True)
    pairs = {
        (settings["adapter.name"], settings["model.quantization"])
        for settings in map(space.settings, space.combinations)
    }
    assert pairs == {("none", "none"), ("lora", "nf4")}


def test_adapters_that_were_asked_for_stay(make_recipe):
    space = space_of(make_recipe("adapter.name=lora"), num_layers=2, has_bfloat16=True)
    assert all("adapter.name" not in dimension.keys for dimension in space.dimensions)


def test_every_value_that_changes_the_mathematics_has_a_word_for_it():
    words = set(Consent.__args__)
    named = set()
    for key in recipe_keys().values():
        effects = [key.effects] if isinstance(key.effects, Effect) else list((key.effects or {}).values())
        named |= {effect.consent for effect in effects if effect.consent}
        for value in key.search_values:
            effect = key.effect_of(value)
            assert effect.fidelity != "other mathematics" or effect.consent, (key.path, value)
    assert named == words
    assert {*INCLUDED, *INCLUDED.values()} <= words
    assert consent_keys()


def test_rules_name_keys_that_exist():
    """A key that a rule reads by another name would be none of its dimensions."""
    known = {*recipe_keys(), *(key.partition(".")[0] for key in recipe_keys())}
    for rule in CONFLICTS:
        assert set(rule.keys) <= known, rule.rule


def test_a_recipe_of_defaults_may_be_anything_that_is_tried(make_recipe):
    recipe: Recipe = make_recipe()
    for key in recipe_keys().values():
        assert len(set(map(repr, key.search_values))) == len(key.search_values), key.path
        for value in key.search_values:
            assert with_settings(recipe, {key.path: value}) is not None
