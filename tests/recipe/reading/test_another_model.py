"""A recipe's values that go by its model's size, with another model."""

from __future__ import annotations

import json
import logging

import pytest
import yaml

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.recipe import load_recipe, recipe_to_yaml
from lowmem_ft.recipe.checks.path_checks import check_sizes_of_model
from lowmem_ft.recipe.reading.another_model import fitted_in
from lowmem_ft.recipe.space.search_space import with_settings


@pytest.mark.parametrize(
    "name, model, skipped, resident, length",
    [
        ("7b-lora", "pythia-160m", 8, 0, 2048),  # 19 of 28 layers, of 12
        ("7b-lora", "gpt2", 8, 0, 1024),  # its config calls both sizes by other names
        ("7b-lora", "qwen3-14b", 27, 0, 2048),  # of 40
        ("7b-lora", "qwen2.5-7b", 19, 0, 2048),
        ("8b-16gb", "pythia-70m", 0, 1, 2048),  # 8 of 36, of 6
        (
            "gemma-4-e4b-qlora",
            "llama-3.1-8b",
            23,
            0,
            2048,
        ),  # 31 of 42; both have parts or variants of their own
    ],
)
def test_last_layers_keep_their_share_and_rows_are_no_longer_than_the_model_takes(
    name, model, skipped, resident, length
):
    recipe = load_recipe(name, [f"model={model}"])
    assert recipe.checkpointing.skip_last_layers == skipped
    assert recipe.offload.resident_layers == resident
    assert recipe.data.max_length == length
    check_sizes_of_model(recipe)


def test_each_change_is_logged_with_the_sizes_that_decide(caplog):
    caplog.set_level(logging.INFO)
    recipe = load_recipe("7b-lora", ["model=gpt2"])
    assert [text for text in caplog.messages if "not the recipe's" in text] == fitted_in(recipe)
    assert fitted_in(recipe) == [
        "checkpointing.skip_last_layers=8, not the recipe's 19: gpt2 has 12 layers, Qwen/Qwen2.5-7B 28.",
        "data.max_length=1024, not the recipe's 2048: gpt2 takes up to 1024 tokens.",
    ]
    assert fitted_in(load_recipe("7b-lora")) == []
    assert len(fitted_in(with_settings(recipe, {"checkpointing.skip_last_layers": 0}))) == 1


@pytest.mark.parametrize(
    "typed, rule",
    [
        ("checkpointing.skip_last_layers=14", "checkpointing.skip_last_layers must be from 0 to 11"),
        ("data.max_length=2048", "data.max_length is at most what the model takes, 1024"),
    ],
)
def test_what_the_user_sets_stays_and_is_refused(typed, rule, tmp_path):
    own = tmp_path / "own.yaml"
    key, _, value = typed.partition("=")
    group, _, leaf = key.partition(".")
    model = {"name_or_path": "gpt2"}
    own.write_text(yaml.safe_dump({"base": "7b-lora", "model": model, group: {leaf: int(value)}}), "utf-8")
    for recipe in (load_recipe("7b-lora", ["model=gpt2", typed]), load_recipe(own)):
        with pytest.raises(UserError, match=rule):
            check_sizes_of_model(recipe)


def test_a_file_of_ones_own_is_a_recipe_like_the_shipped_ones(tmp_path):
    """Its model, or one set beside it, is the recipe's own for what it extends and for what extends it."""
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps({"model_type": "x", "n_layers": 4}), "utf-8")
    own = tmp_path / "own.yaml"
    own.write_text("base: 7b-lora\nmodel: {name_or_path: pythia-160m}\n", "utf-8")
    assert load_recipe(own).checkpointing.skip_last_layers == 8
    assert load_recipe(own, [f"model={tmp_path / 'small'}"]).checkpointing.skip_last_layers == 2
    assert load_recipe(own, ["model=nobody/knows-it"]).checkpointing.skip_last_layers == 8


def test_what_is_written_down_is_what_was_used(tmp_path):
    recipe = load_recipe("7b-lora", ["model=gpt2"])
    kept = tmp_path / "recipe.yaml"
    kept.write_text(recipe_to_yaml(recipe), "utf-8")
    again = load_recipe(kept)
    assert again == recipe
    assert again.checkpointing.skip_last_layers == 8
    assert fitted_in(again) == []
