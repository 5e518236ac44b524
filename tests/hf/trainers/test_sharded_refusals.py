"""A trainer launched with FSDP: what of it does not work, each in a line that says the way out."""

from __future__ import annotations

import types

import pytest
import torch
from attached_trainers import recipe_of, trainer_of
from torch.distributed.fsdp import CPUOffloadPolicy

from lowmem_ft import hf
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.hf.trainers.sharded_refusals import problems_of_fsdp


def sharded(folder, *, mixed_precision="no", model=None, **plugin):
    """A trainer with the accelerator of a launch with FSDP 2, as far as it is asked."""
    trainer, _ = trainer_of(folder, model=model)
    own = {
        "fsdp_version": 2,
        "activation_checkpointing": False,
        "cpu_offload": None,
        "ignored_modules": None,
        "reshard_after_forward": True,
        "mixed_precision_policy": None,
    }
    is_fsdp2 = plugin.get("fsdp_version", 2) == 2
    trainer.is_fsdp_enabled = True
    trainer.accelerator = types.SimpleNamespace(
        num_processes=2,
        is_fsdp2=is_fsdp2,
        mixed_precision=mixed_precision,
        distributed_type=types.SimpleNamespace(value="FSDP"),
        state=types.SimpleNamespace(fsdp_plugin=types.SimpleNamespace(**{**own, **plugin})),
        scaler=None,
    )
    return trainer


def refused(trainer, *settings):
    with pytest.raises(UserError) as caught:
        hf.attach(trainer, recipe_of(*settings))
    assert len(set(caught.value.problems)) == len(caught.value.problems), "said twice"
    return " ".join(caught.value.problems)


@pytest.mark.parametrize(
    "plugin, words",
    [
        ({"fsdp_version": 1}, 'got FSDP 1. Set fsdp_config={"version": 2}'),
        ({"activation_checkpointing": True}, "Set it to False, and checkpointing.mode=full"),
        ({"cpu_offload": CPUOffloadPolicy()}, "offload.optimizer=host in the recipe"),
        ({"ignored_modules": ["lm_head"]}, "Leave ignored_modules out"),
        ({"mixed_precision": "fp16"}, "Set bf16=True"),
    ],
)
def test_settings_of_fsdp(plugin, words, tmp_path):
    assert words in refused(sharded(tmp_path, **plugin))


@pytest.mark.parametrize(
    "settings, words",
    [
        (["optimizer.name=adafactor"], "optimizer.name=adafactor works in one process"),
        (["distributed.strategy=ddp"], "is not how the trainer was launched, with FSDP 2"),
    ],
)
def test_settings_of_the_recipe(settings, words, tmp_path):
    assert words in refused(sharded(tmp_path), *settings)


def test_packed_weights_that_would_stay_whole(tmp_path):
    packed = type("Params4bit", (torch.nn.Parameter,), {})
    trainer = sharded(tmp_path)
    layer = trainer.model.model.layers[0].mlp
    layer.packed = packed(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    assert "model.layers.0.mlp.packed are packed as integers" in refused(trainer)


def test_a_plan(tmp_path):
    with pytest.raises(UserError, match="Plan with `lowmem-ft plan"):
        hf.attach(sharded(tmp_path), plan="auto")


def test_another_trainer(tmp_path):
    [problem] = problems_of_fsdp(sharded(tmp_path), recipe_of(), "GRPOTrainer", False)
    assert "works with FSDP 2 in Trainer, SFTTrainer, DPOTrainer, got GRPOTrainer" in problem
