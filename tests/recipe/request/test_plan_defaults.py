"""What a plan assumes of a model without a recipe, and what it is called."""

from __future__ import annotations

import json

import pytest

from lowmem_ft.recipe import load_recipe
from lowmem_ft.recipe.request.plan_defaults import named_as_planned, with_defaults_of_plan

ROWS = "training.gradient_accumulation_steps=16"


@pytest.mark.parametrize(
    "fields, length",
    [
        ({"max_position_embeddings": 512}, 512),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 131072}, 2048),
        ({"text_config": {"max_position_embeddings": 256}}, 256),
        ({}, 2048),
    ],
)
def test_rows_are_no_longer_than_the_model_takes(tmp_path, fields, length):
    (tmp_path / "config.json").write_text(json.dumps(fields), "utf-8")
    for key in ("model", "model.name_or_path"):
        settings = [f"{key}={tmp_path}"]
        assert with_defaults_of_plan(settings) == [ROWS, f"data.max_length={length}", *settings]


@pytest.mark.parametrize(
    "typed, is_added",
    [
        (["model.quantization=nf4"], True),
        (["adapter.r=8"], True),
        (["model.quantization=nf4", "adapter.name=lora"], False),
        (["model.quantization=none"], False),
        ([], False),
    ],
)
def test_settings_that_only_adapters_have_mean_lora_as_for_an_estimate(typed, is_added):
    settings = with_defaults_of_plan(["model=qwen3-32b", *typed])
    assert ("adapter.name=lora" in settings and "adapter.name=lora" not in typed) == is_added
    load_recipe(None, settings)


def test_what_is_said_stays_as_it_is():
    settings = ["model=no/such", "data.max_length=4096", "training.per_device_train_batch_size=2"]
    assert with_defaults_of_plan(settings) == settings
    assert with_defaults_of_plan(["model=no/such"])[1] == "data.max_length=2048"


@pytest.mark.parametrize(
    "model, name",
    [
        ("Qwen/Qwen2.5-7B", "Qwen2.5-7B-24GiB-rtx-4090"),
        ("./models/my model/", "my-model-24GiB-rtx-4090"),
        ("models/x.Q4_K_M.gguf", "x.Q4_K_M-24GiB-rtx-4090"),
    ],
)
def test_a_plan_of_a_model_alone_is_called_by_the_model_and_what_it_is_for(model, name):
    recipe = load_recipe(None, [f"model={model}"])
    planned = named_as_planned(recipe, [f"model={model}"], "24GiB", "rtx-4090")
    assert planned.name == name
    assert named_as_planned(planned, [], "rtx-4090").name == name  # planned again
    assert named_as_planned(recipe, ["name=mine"], "24GiB") is recipe
