"""Another data set or model than the recipe's own: what described the old one does not hold for the new one."""

from __future__ import annotations

import logging

import pytest

from lowmem_ft.recipe import load_recipe

BASE = """
model: {name_or_path: some/model, revision: abc, trust_remote_code: true}
data:
  path: some/chats
  name: main
  revision: v1
  format: messages
  split: train_sft
  eval_split: test_sft[:512]
  max_length: 77
training: {eval_steps: 500, save_steps: 50}
"""


@pytest.fixture
def base(tmp_path):
    (tmp_path / "base.yaml").write_text(BASE)
    return tmp_path / "base.yaml"


def test_the_splits_of_the_recipes_data_go_with_it(base):
    recipe = load_recipe(base, ["data=mine.jsonl"])
    data = recipe.data
    assert (data.path, data.split, data.eval_split, data.name) == ("mine.jsonl", "train", None, None)
    assert (data.revision, data.format) == (None, "auto")
    assert data.max_length == 77
    assert (recipe.training.eval_steps, recipe.training.save_steps) == (None, 50)


@pytest.mark.parametrize("name", ["1b-bf16", "7b-bf16", "7b-lora", "8b-8gb", "demo"])
def test_one_setting_puts_a_shipped_recipe_on_data_of_your_own(name):
    data = load_recipe(name, ["data=mine.jsonl"]).data
    assert (data.split, data.eval_split, data.eval_path, data.format) == ("train", None, None, "auto")


def test_what_is_set_beside_the_new_data_counts(base):
    data = load_recipe(base, ["data.split=valid", "data=mine", "data.eval_split=test"]).data
    assert (data.split, data.eval_split, data.name) == ("valid", "test", None)
    assert load_recipe(base, ["data=mine", "data.eval_size=0.1"]).training.eval_steps == 500


def test_a_child_recipe_replaces_its_bases_data_likewise(base, tmp_path):
    (tmp_path / "child.yaml").write_text("base: base.yaml\ndata: {path: other/chats, split: train_all}\n")
    data = load_recipe(tmp_path / "child.yaml").data
    assert (data.path, data.split, data.eval_split) == ("other/chats", "train_all", None)
    assert load_recipe(tmp_path / "child.yaml", ["data=third"]).data.split == "train"


def test_settings_before_any_source_and_of_the_same_source_stay(base, tmp_path):
    assert load_recipe(base, ["data=some/chats"]).data.split == "train_sft"
    (tmp_path / "no_data.yaml").write_text("model: {name_or_path: m}\ndata: {split: mine}\n")
    assert load_recipe(tmp_path / "no_data.yaml", ["data=x"]).data.split == "mine"


def test_other_held_out_data_has_splits_of_its_own(base):
    data = load_recipe(base, ["data.eval_path=mine.jsonl"]).data
    assert (data.path, data.split, data.eval_split) == ("some/chats", "train_sft", None)


def test_trust_and_revision_are_not_passed_on_to_another_model(base):
    model = load_recipe(base, ["model=other/model"]).model
    assert (model.revision, model.trust_remote_code) == (None, False)
    assert load_recipe(base).model.trust_remote_code is True


def test_what_was_left_out_is_said(base, caplog):
    with caplog.at_level(logging.INFO):
        load_recipe(base, ["data=mine.jsonl"])
    (message,) = caplog.messages
    assert message.startswith(
        "data.path=mine.jsonl replaces some/chats, and the settings for that, data.name=main, "
    )
    assert "training.eval_steps=500" in message
