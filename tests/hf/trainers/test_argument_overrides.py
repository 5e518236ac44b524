"""What was said over a recipe by name, as its arguments were made, is what a trainer with that recipe does."""

from __future__ import annotations

import dataclasses
import logging

import pytest
from attached_trainers import recipe_of, rows
from tiny_models import tiny_llama
from transformers import Trainer

from lowmem_ft import hf
from lowmem_ft.foundation.errors import UserError

CPU = ("training.use_cpu=true", "training.report_to=[]")


def trainer_with(recipe, folder, **overrides):
    args = hf.training_arguments(recipe, output_dir=str(folder), **overrides)
    return Trainer(model=tiny_llama(), args=args, train_dataset=rows())


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
def test_an_override_is_trained_with_and_logged_once_with_both_values(key, tmp_path, caplog):
    said, override, expected = OVERRIDDEN[key]
    recipe = recipe_of(f"{key}={said}", *CPU)
    trainer = trainer_with(recipe, tmp_path, **override)
    with caplog.at_level(logging.INFO, "lowmem_ft.hf"):
        handle = hf.attach(trainer, recipe)
    group, name = key.split(".")
    assert getattr(getattr(handle.recipe, group), name) == expected
    (line,) = [one.message for one in caplog.records if one.message.startswith("Overridden")]
    assert f" for {key}=" in line
    assert next(iter(override)) in line or "mixed_precision" in line


def test_a_value_that_changed_after_the_arguments_were_made_was_not_said(tmp_path):
    recipe = recipe_of("training.learning_rate=1e-4", *CPU)
    trainer = trainer_with(recipe, tmp_path, learning_rate=1e-3)
    trainer.args.learning_rate = 1e-2
    with pytest.raises(UserError, match=r"learning_rate=0\.0001 differs from the trainer's"):
        hf.attach(trainer, recipe)


def test_a_recipe_that_says_something_else_than_that_of_the_arguments_was_not_overridden(tmp_path):
    trainer = trainer_with(recipe_of("training.learning_rate=1e-4", *CPU), tmp_path, learning_rate=1e-3)
    with pytest.raises(UserError, match=r"learning_rate=2e-06 differs from the trainer's"):
        hf.attach(trainer, recipe_of("training.learning_rate=2e-6", *CPU))


def test_one_override_says_nothing_of_other_fields(tmp_path):
    recipe = recipe_of("training.learning_rate=1e-4", "training.seed=7", *CPU)
    trainer = trainer_with(recipe, tmp_path, learning_rate=1e-3)
    trainer.args.seed = 8
    with pytest.raises(UserError) as caught:
        hf.attach(trainer, recipe)
    (problem,) = caught.value.problems
    assert problem.startswith("training.seed=7 differs from the trainer's")


def test_arguments_made_anew_from_others_have_said_nothing(tmp_path):
    recipe = recipe_of("training.learning_rate=1e-4", *CPU)
    args = hf.training_arguments(recipe, output_dir=str(tmp_path), learning_rate=1e-3)
    trainer = Trainer(model=tiny_llama(), args=dataclasses.replace(args, max_steps=1), train_dataset=rows())
    with pytest.raises(UserError, match=r"learning_rate=0\.0001 differs from the trainer's"):
        hf.attach(trainer, recipe)


def test_a_launchers_precision_is_no_override_of_somebodys(tmp_path, monkeypatch):
    """It wins over a field that is off; two have spoken, and neither of them to the other."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    recipe = recipe_of("training.mixed_precision=fp16", *CPU)
    trainer = trainer_with(recipe, tmp_path, fp16=False)
    assert trainer.accelerator.mixed_precision == "bf16"
    with pytest.raises(
        UserError, match=r"mixed_precision=fp16 .* trainer\.accelerator\.mixed_precision=bf16"
    ):
        hf.attach(trainer, recipe)


def test_rows_of_vertical_order_are_those_of_the_override_in_micro_batches_of_the_recipe(tmp_path):
    rows_of_four = ("training.per_device_train_batch_size=4", "training.gradient_accumulation_steps=2")
    recipe = recipe_of("accumulation.order=vertical", "checkpointing.mode=full", *rows_of_four, *CPU)
    trainer = trainer_with(recipe, tmp_path, per_device_train_batch_size=12)
    training = hf.attach(trainer, recipe).recipe.training
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (4, 3)
