"""What a recipe and a trainer both set: whose value trains, and the one listing of where they differ."""

from __future__ import annotations

import dataclasses
import logging
import operator
import types

import pytest
from attached_trainers import problems_of, recipe_of, rows, trainer_of
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_llama
from transformers import Trainer

from lowmem_ft import hf, load_recipe
from lowmem_ft.hf.trainers.agreement import agree
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.reading.recipe_files import shipped_recipes
from lowmem_ft.recipe.trainers.trainer_kinds import DECIDED_BY_A_TRAINER, KINDS, ROWS, Refused

CPU = ("training.use_cpu=true", "training.report_to=[]")


def made_from(recipe, folder, **overrides):
    args = hf.training_arguments(recipe, output_dir=str(folder), **overrides)
    return Trainer(model=tiny_llama(), args=args, train_dataset=rows())


def attached(trainer, recipe, caplog):
    """The handle, and the listing's lines with its level; no lines if nothing was listed."""
    with caplog.at_level(logging.INFO, "lowmem_ft.hf"):
        handle = hf.attach(trainer, recipe)
    listings = [one for one in caplog.records if one.message.startswith("Recipe and trainer differ")]
    assert len(listings) <= 1
    lines = [line for one in listings for line in one.message.splitlines()[1:]]
    assert [line.strip() for line in lines] == [str(one) for one in handle.differences]
    return handle, lines, listings and listings[0].levelname


DIFFERENT = {
    "training.learning_rate": ("0.0001", "the trainer's 0.01, not the recipe's 0.0001"),
    "training.seed": ("7", "the trainer's 42, not the recipe's 7"),
    "training.gradient_accumulation_steps": ("4", "the trainer's 2, not the recipe's 4"),
    "training.per_device_train_batch_size": ("2", "the trainer's 4, not the recipe's 2"),
    "training.mixed_precision": ("bf16", "the trainer's no, not the recipe's bf16"),
    "training.num_train_epochs": ("5", "the trainer's num_train_epochs=3.0, not the recipe's 5.0"),
    "training.save_steps": ("7", "the trainer's save_strategy=no, save_steps=500, not the recipe's 7"),
    "training.save_total_limit": ("3", "the trainer's save_total_limit=null, not the recipe's 3"),
    "training.max_grad_norm": ("null", "the recipe's null, not the trainer's 0.5"),
    "optimizer.weight_decay": ("0.1", "the recipe's 0.1, not the trainer's 0.0"),
    "optimizer.betas": ("[0.9, 0.95]", "the recipe's [0.9, 0.95], not the trainer's [0.9, 0.999]"),
    "optimizer.eps": ("1e-06", "the recipe's 1e-06, not the trainer's 1e-08"),
}
BY_THE_TRAINER = {
    "training.learning_rate": 0.01,
    "training.seed": 42,
    "training.gradient_accumulation_steps": 2,
    "training.per_device_train_batch_size": 4,
    "training.mixed_precision": "no",
}
BY_THE_RECIPE = {
    "training.max_grad_norm": None,
    "optimizer.weight_decay": 0.1,
    "optimizer.betas": (0.9, 0.95),
    "optimizer.eps": 1e-6,
}


def test_the_trainer_has_steps_and_precision_and_the_recipe_its_optimizer_and_clipping(tmp_path, caplog):
    """Each difference is a warning with both values, in one listing."""
    trainer, _ = trainer_of(tmp_path)
    recipe = recipe_of(*(f"{key}={value}" for key, (value, _) in DIFFERENT.items()))
    handle, lines, level = attached(trainer, recipe, caplog)
    assert level == "WARNING"
    assert {line.strip() for line in lines} == {f"{key}: {words}" for key, (_, words) in DIFFERENT.items()}
    for key, value in {**BY_THE_TRAINER, **BY_THE_RECIPE}.items():
        assert operator.attrgetter(key)(handle.recipe) == value, key
    (group,) = {group["weight_decay"] for group in trainer.optimizer.param_groups} - {0.0}
    assert group == 0.1


def test_one_process_lists_for_all(tmp_path, caplog, monkeypatch):
    """A warning is printed without any set-up of logging: eight ranks would print it eight times."""
    trainer, _ = trainer_of(tmp_path)
    monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)
    with caplog.at_level(logging.INFO, "lowmem_ft.hf"):
        handle = hf.attach(trainer, recipe_of("optimizer.weight_decay=0.1", "data.max_length=64"))
    assert [one.key for one in handle.differences] == ["optimizer.weight_decay"]
    assert not [one for one in caplog.records if one.message.startswith(("Recipe and", "Neither"))]


def test_what_a_recipe_does_not_set_follows_the_trainer_and_is_not_listed(tmp_path, caplog):
    trainer, _ = trainer_of(tmp_path, fields={"weight_decay": 0.2, "adam_beta2": 0.95, "max_grad_norm": 0.0})
    handle, lines, _ = attached(trainer, recipe_of(), caplog)
    assert lines == []
    assert (handle.recipe.optimizer.weight_decay, handle.recipe.optimizer.betas) == (0.2, (0.9, 0.95))
    assert handle.recipe.training.max_grad_norm is None


DEFAULTS_WRITTEN = {
    "training.seed": ("42", {"seed": 7}, "the trainer's 7, not the recipe's 42"),
    "optimizer.weight_decay": ("0.0", {"weight_decay": 0.2}, "the recipe's 0.0, not the trainer's 0.2"),
    "data.packing": ("false", {"packing": True}, "the trainer's packing=true, not the recipe's false"),
}


@pytest.mark.parametrize("source", ["override", "file", "base", "changed copy"])
def test_a_default_that_a_file_or_an_override_writes_is_the_recipes_word(source, tmp_path):
    settings = [f"{key}={value}" for key, (value, _, _) in DEFAULTS_WRITTEN.items()]
    groups = (f"{key.replace('.', ': {')}: {value}}}" for key, (value, _, _) in DEFAULTS_WRITTEN.items())
    written, above = tmp_path / "written.yaml", tmp_path / "above.yaml"
    written.write_text("\n".join(["model: {name_or_path: any}", *groups]))
    above.write_text("base: written.yaml")
    recipe = {
        "override": lambda: load_recipe(None, ["model=any", *settings]),
        "file": lambda: load_recipe(written),
        "base": lambda: load_recipe(above),
        "changed copy": lambda: dataclasses.replace(load_recipe(written), name="copy"),
    }[source]()
    fields = {name: value for _, given, _ in DEFAULTS_WRITTEN.values() for name, value in given.items()}
    args = hf.sft_config(recipe_of(), output_dir=str(tmp_path), use_cpu=True, report_to=[])
    trainer = types.SimpleNamespace(
        args=dataclasses.replace(args, **fields),
        accelerator=types.SimpleNamespace(mixed_precision="no"),
        model=tiny_llama(),
    )
    listed = agree(trainer, recipe, "SFTTrainer").differences
    assert {str(one) for one in listed} == {
        f"{key}: {words}" for key, (_, _, words) in DEFAULTS_WRITTEN.items()
    }
    assert recipe == dataclasses.replace(recipe, written=frozenset())  # what trains is the same recipe


def test_null_leaves_a_setting_to_the_trainer(tmp_path):
    (tmp_path / "mine.yaml").write_text("{model: {name_or_path: any}, optimizer: {betas: null, eps: 1.0e-7}}")
    assert {"optimizer.eps"} == {
        key for key in load_recipe(tmp_path / "mine.yaml").written if "optimizer" in key
    }


def test_a_plan_for_a_trainer_tries_nothing_that_every_trainer_refuses():
    refused = {row.key for row in ROWS if all(isinstance(row.verdict(kind), Refused) for kind in KINDS)}
    tried = {key.path for key in recipe_keys().values() if key.search_values}
    assert "accumulation.fusion" in refused & tried <= set(DECIDED_BY_A_TRAINER)


def test_arguments_made_from_the_recipe_agree_with_it(tmp_path, caplog):
    settings = [f"{key}={value}" for key, (value, _) in DIFFERENT.items()]
    recipe = recipe_of(*settings, f"training.output_dir={tmp_path}", *CPU)
    trainer = Trainer(model=tiny_llama(), args=hf.training_arguments(recipe), train_dataset=rows())
    assert attached(trainer, recipe, caplog)[1] == []


def test_arguments_made_from_a_shipped_recipe_agree_with_it():
    names = [name for name in shipped_recipes() if load_recipe(name).distributed.strategy is None]
    assert len(names) > 10
    model = tiny_llama()
    for name in names:
        recipe = load_recipe(name, ["training.use_cpu=true"])
        precision = types.SimpleNamespace(mixed_precision=recipe.training.mixed_precision)
        trainer = types.SimpleNamespace(args=hf.sft_config(recipe), accelerator=precision, model=model)
        differences = agree(trainer, recipe, "SFTTrainer").differences
        assert {difference.key for difference in differences} <= {"model.name_or_path"}, (
            name
        )  # a tiny one trains


OVERRIDDEN = {
    "training.learning_rate": (1e-4, {"learning_rate": 1e-3}, 1e-3),
    "training.max_grad_norm": (0.5, {"max_grad_norm": 0.0}, None),
    "training.seed": (7, {"seed": 8}, 8),
    "training.gradient_accumulation_steps": (4, {"gradient_accumulation_steps": 2}, 2),
    "training.per_device_train_batch_size": (4, {"per_device_train_batch_size": 2}, 2),
    "training.mixed_precision": ("bf16", {"bf16": False}, "no"),
    "optimizer.weight_decay": (0.1, {"weight_decay": 0.0}, 0.0),
    "optimizer.betas": ("[0.8,0.95]", {"adam_beta1": 0.9, "adam_beta2": 0.999}, (0.9, 0.999)),
    "optimizer.eps": (1e-6, {"adam_epsilon": 1e-7}, 1e-7),
}


@pytest.mark.parametrize("key", OVERRIDDEN)
def test_an_override_by_name_is_trained_with_and_listed_without_a_warning(key, tmp_path, caplog):
    said, override, expected = OVERRIDDEN[key]
    recipe = recipe_of(f"{key}={said}", *CPU)
    handle, (line,), level = attached(made_from(recipe, tmp_path, **override), recipe, caplog)
    assert operator.attrgetter(key)(handle.recipe) == expected
    assert level == "INFO"
    assert line.strip().startswith(f"{key}: the trainer's ")


@pytest.mark.parametrize("change", ["changed", "made again"])
def test_only_a_value_that_was_given_by_name_is_an_override(change, tmp_path, caplog):
    recipe = recipe_of("optimizer.weight_decay=0.1", *CPU)
    args = hf.training_arguments(recipe, output_dir=str(tmp_path), weight_decay=0.2)
    if change == "made again":
        args = dataclasses.replace(args, max_steps=1)
    trainer = Trainer(model=tiny_llama(), args=args, train_dataset=rows())
    if change == "changed":
        trainer.args.weight_decay = 0.3
    handle, _, level = attached(trainer, recipe, caplog)
    assert handle.recipe.optimizer.weight_decay == 0.1
    assert level == "WARNING"


def test_rows_of_vertical_order_are_the_trainers_in_micro_batches_of_the_recipe(tmp_path, caplog):
    rows_of_four = ("training.per_device_train_batch_size=4", "training.gradient_accumulation_steps=2")
    recipe = recipe_of("accumulation.order=vertical", "checkpointing.mode=full", *rows_of_four, *CPU)
    trainer = made_from(recipe, tmp_path, per_device_train_batch_size=12)
    handle, (line,), _ = attached(trainer, recipe, caplog)
    training = handle.recipe.training
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (4, 3)
    assert "the trainer's 3 (per_device_train_batch_size=12), not the recipe's 2" in line


def test_settings_that_nothing_acts_on_are_named(tmp_path, caplog):
    trainer, _ = trainer_of(tmp_path)
    unread = (
        "data.path=mine.jsonl",
        "data.max_length=64",
        "budget.retry=false",
        "distributed.num_processes=1",
    )
    with caplog.at_level(logging.INFO, "lowmem_ft.hf"):
        hf.attach(trainer, recipe_of(*unread))
    (line,) = [one.message for one in caplog.records if one.message.startswith("Neither")]
    assert all(setting in line for setting in unread), line


def test_an_adapter_of_other_layers_than_the_recipes_is_refused(tmp_path):
    model = get_peft_model(
        tiny_llama(), LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    trainer, _ = trainer_of(tmp_path, model=model)
    (problem,) = problems_of(trainer, "adapter.name=lora", "adapter.target_modules=[q_proj]")
    assert problem.startswith("adapter.target_modules=['q_proj']")
    hf.attach(trainer, recipe_of("adapter.name=lora", "adapter.target_modules=[v_proj,q_proj]")).remove()
