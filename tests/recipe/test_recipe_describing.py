from __future__ import annotations

import dataclasses

from omegaconf import OmegaConf

from lowmem_ft.recipe import Recipe, load_recipe, recipe_to_yaml
from lowmem_ft.recipe.reading.keys import recipe_groups, recipe_keys


def test_every_field_of_every_group_is_a_key_with_an_explanation():
    keys = recipe_keys()
    expected = {
        f"{group}.{field.name}" for group, cls in recipe_groups().items() for field in dataclasses.fields(cls)
    }
    assert set(keys) == expected | {"name", "description"}
    assert [path for path, key in keys.items() if not key.help.strip()] == []
    assert {"model", "data", "training", "optimizer"} <= recipe_groups().keys()


def test_the_yaml_holds_every_key():
    written = OmegaConf.to_container(OmegaConf.create(recipe_to_yaml(load_recipe("7b-bf16"))))
    paths = {f"{group}.{name}" for group in recipe_groups() for name in written[group]}
    assert paths | {"name", "description"} == set(recipe_keys())


def test_the_yaml_explains_each_key_above_it_and_what_a_memory_knob_frees_and_costs():
    lines = recipe_to_yaml(load_recipe("7b-bf16")).splitlines()
    for key in recipe_keys().values():
        indent = "  " if "." in key.path else ""
        assert f"{indent}# {key.help.split()[0]}" in "\n".join(lines)
    memory_knobs = [key for key in recipe_keys().values() if key.frees]
    assert len(memory_knobs) >= 8
    assert sum(line.startswith("  # Frees: ") for line in lines) == len(memory_knobs)
    assert all(len(line) <= 80 for line in lines if line.lstrip().startswith("#"))


def test_what_is_written_loads_to_an_equal_recipe(tmp_path):
    recipe = load_recipe(
        "7b-bf16",
        [
            "training.report_to=[wandb]",
            "training.lr_scheduler_type=cosine_with_min_lr",
            "training.lr_scheduler_kwargs={min_lr: 1e-7}",
            "optimizer.betas=[0.9, 0.95]",
            "training.max_grad_norm=null",
            "budget=24GiB",
        ],
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_to_yaml(recipe), encoding="utf-8")
    assert load_recipe(path) == recipe
    assert recipe.name == "7b-bf16"


def test_defaults_round_trip_too(tmp_path):
    recipe = Recipe(name="plain", model=type(Recipe().model)(name_or_path="m"))
    path = tmp_path / "other-name.yaml"
    path.write_text(recipe_to_yaml(recipe), encoding="utf-8")
    assert load_recipe(path) == recipe
