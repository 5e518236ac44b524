"""What a recipe cannot be attached to, and what a trainer was told that would silently do nothing: each by name."""

from __future__ import annotations

import re
import types

import pytest
import torch
from attached_trainers import arguments, problems_of, recipe_of, sentence_of, trainer_of
from tiny_models import tiny_llama
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from lowmem_ft import hf
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.hf.trainers.refusals import problems_with_trainer

VERTICAL = ("accumulation.order=vertical", "checkpointing.mode=full")
STREAMED = (*VERTICAL, "offload.parameters=stream", "offload.optimizer=host", "optimizer.in_backward=true")


MADE_OTHERWISE = {
    "model.dtype=bfloat16": "float32",
    "model.quantization=nf4": "none",
    "model.attn_implementation=eager": "sdpa",
    "adapter.name=lora": "none",
}


def test_what_was_decided_as_the_model_was_made_is_named_with_both_all_at_once(tmp_path):
    trainer, _ = trainer_of(tmp_path)
    problems = problems_of(trainer, *MADE_OTHERWISE)
    for setting, theirs in MADE_OTHERWISE.items():
        (problem,) = [one for one in problems if one.startswith(f"{setting} ")]
        assert f"the trainer's has {theirs}. Pass model=hf.prepare_model(" in problem
        assert f"leave {setting.partition('=')[0]} out" in problem


def test_a_recipe_for_a_model_of_another_shape_is_listed_with_both(tmp_path):
    trainer, _ = trainer_of(tmp_path)
    handle = hf.attach(trainer, recipe_of("model=llama-3.1-8b"))
    (difference,) = [one for one in handle.differences if one.key == "model.name_or_path"]
    layers, name = trainer.model.config.num_hidden_layers, handle.recipe.model.name_or_path
    assert difference.recipes == "llama-3.1-8b"
    assert difference.used == "trainer"
    assert difference.trainers.startswith(f"{name} (")
    assert f"num_hidden_layers {layers}, not 32" in difference.trainers


@pytest.mark.parametrize(
    "fields, settings, words",
    [
        ({"gradient_accumulation_steps": 2}, VERTICAL, "gradient_accumulation_steps must be 1, got 2"),
        (
            {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 6},
            (*VERTICAL, "training.per_device_train_batch_size=4"),
            "per_device_train_batch_size must be a multiple of 4",
        ),
        ({"label_smoothing_factor": 0.1}, (), "label_smoothing_factor=0.1 removes the labels"),
        ({"torch_compile": True}, (), "TrainingArguments.torch_compile"),
        ({"auto_find_batch_size": True}, (), "auto_find_batch_size.*lowmem-ft plan"),
        ({"bf16_full_eval": True}, (), "bf16_full_eval rounds the weights"),
        (
            {"neftune_noise_alpha": 5.0},
            STREAMED,
            "neftune_noise_alpha adds noise after an embedding",
        ),
        ({"optim": "adafactor"}, (), "optim=adafactor is not.*set optimizer.name=adafactor"),
        ({"optim": "galore_adamw", "optim_target_modules": ["q_proj"]}, (), "lowmem_ft does not have"),
        ({"optim_args": "beta=1"}, (), "TrainingArguments.optim_args"),
        (
            {"adam_epsilon": 1e-6},
            ("optimizer.name=lion",),
            "adam_epsilon=1e-06 is for another optimizer: optimizer.name=lion has no eps",
        ),
        ({}, ("optimizer.in_backward=true",), "optimizer.in_backward needs accumulation.order=vertical"),
        ({}, ("checkpointing.mode=auto",), "checkpointing.mode=auto"),
        ({}, ("plan.mode=auto",), "plan.mode=auto"),
    ],
)
def test_training_arguments_that_cannot_go_with_it(fields, settings, words, tmp_path):
    trainer, _ = trainer_of(tmp_path, fields=fields)
    problems = problems_of(trainer, *settings)
    assert any(re.search(words, problem) for problem in problems), problems


@pytest.mark.parametrize(
    "given, words",
    [
        (
            {"compute_loss_func": lambda outputs, labels, **_: outputs.loss},
            "compute_loss_func removes the labels",
        ),
        ({"model_init": lambda: tiny_llama()}, "model_init creates another"),
        (
            {"optimizers": (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), None)},
            "another was passed to the trainer: SGD",
        ),
        ({"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1.0})}, "Leave optimizer_cls_and_kwargs= out"),
    ],
)
def test_what_a_constructor_was_given_that_cannot_go_with_it(given, words, tmp_path):
    if "model_init" in given:
        trainer = Trainer(args=TrainingArguments(str(tmp_path), **arguments()), **given)
    else:
        trainer, _ = trainer_of(tmp_path, **given)
    assert words in sentence_of(trainer)


def test_what_a_trainer_would_change_of_the_model_as_training_begins(tmp_path):
    trainer, _ = trainer_of(tmp_path)
    trainer.args._n_gpu = 2
    assert "hf.attach() works with one GPU a process, and this one sees 2" in sentence_of(trainer)


def test_a_loss_of_ones_own_is_asked_for_its_logits(tmp_path):
    class Weighed(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    trainer, _ = trainer_of(tmp_path, kind=Weighed)
    assert "Weighed.compute_loss is not the method of Trainer" in sentence_of(trainer)
    hf.attach(trainer, recipe_of("loss.chunk_tokens=null")).remove()


def test_flattened_batches_have_no_rows_to_cut(tmp_path):
    trainer, _ = trainer_of(tmp_path, fields={"gradient_accumulation_steps": 1})
    trainer.data_collator = DataCollatorWithFlattening()
    assert "padding-free batches are one row" in sentence_of(trainer, *VERTICAL)


def test_attaching_twice_to_the_trainer_or_to_its_model(tmp_path):
    trainer, _ = trainer_of(tmp_path)
    handle = hf.attach(trainer, recipe_of())
    other, _ = trainer_of(tmp_path, model=trainer.model)
    for one in (trainer, other):
        with pytest.raises(UserError, match=r"once, but a recipe is already attached .* remove\(\)"):
            hf.attach(one, recipe_of())
    handle.remove()
    hf.attach(other, recipe_of()).remove()


def test_a_trainer_that_has_trained_already(tmp_path):
    trainer, _ = trainer_of(tmp_path, fields={"max_steps": 1})
    trainer.train()
    assert any("before the trainer's first train()" in problem for problem in problems_of_trained(trainer))


def problems_of_trained(trainer):
    with pytest.raises(UserError) as caught:
        hf.attach(trainer, recipe_of())
    return caught.value.problems


def test_streamed_weights_that_the_trainer_has_moved(tmp_path):
    """On this machine there is no other device to move to: the trainer says that it trains on one."""
    settings = (
        "offload.parameters=stream",
        "offload.optimizer=host",
        "optimizer.in_backward=true",
        "checkpointing.mode=full",
    )
    trainer, _ = trainer_of(tmp_path, fields={"gradient_accumulation_steps": 1})
    with torch.device("meta"):
        trainer.model = tiny_llama()
    assert any(
        "hf.prepare_model(model, recipe)" in problem
        for problem in list(problems_with_trainer(trainer, recipe_of(*settings), "Trainer"))
    )


def test_only_trainers_that_are_known():
    with pytest.raises(
        UserError, match=r"takes Trainer, SFTTrainer, .* or RewardTrainer, got SimpleNamespace"
    ):
        hf.attach(types.SimpleNamespace(), recipe_of())
