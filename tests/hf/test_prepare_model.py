"""Models that are quantised, adapted or kept on the host before a trainer's constructor sees them."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from attached_trainers import TINY, attached_trainer, recipe_of, trainer_of
from tiny_models import tiny_llama

from lowmem_ft import hf, load_recipe
from lowmem_ft.errors import UserError

CPU = "training.use_cpu=true"


def test_a_model_by_its_name_is_quantised_and_trains_beside_its_weights(tmp_path):
    recipe = load_recipe(
        None, [f"model={TINY}", "model.weights=random", "model.quantization=nf4", "adapter.name=lora", CPU]
    )
    model = hf.prepare_model(str(TINY), recipe)
    assert model.get_base_model().is_loaded_in_4bit
    trainer, meter = trainer_of(tmp_path, model=model)
    handle = hf.attach(trainer, recipe)
    frozen = model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight.clone()
    trainer.train()
    assert handle.recipe.model.quantization == "nf4"
    assert meter.losses[-1] < meter.losses[0]
    assert torch.equal(model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight, frozen)


def test_masters_begin_with_the_bits_that_bfloat16_weights_have_lost(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "float32")
    settings = [f"model={tmp_path / 'float32'}", "model.dtype=bfloat16", "optimizer.master=split16", CPU]
    recipe = load_recipe(None, settings)
    model = hf.prepare_model(str(tmp_path / "float32"), recipe)
    trainer, _ = trainer_of(tmp_path / "run", model=model)
    handle = hf.attach(trainer, recipe)
    optimizer, weight = trainer.optimizer.optimizer, model.lm_head.weight
    value = optimizer.master_of(weight).read(weight.detach().flatten(), optimizer.state[weight])
    assert torch.equal(value.view(weight.shape), tiny_llama().lm_head.weight)
    handle.remove()


def test_a_streamed_model_is_marked_as_placed():
    streamed = recipe_of("offload.parameters=stream", "adapter.name=lora", "checkpointing.mode=full", CPU)
    assert hf.prepare_model(tiny_llama(), streamed).get_base_model().hf_device_map == {
        "": torch.device("cpu")
    }
    assert not hasattr(hf.prepare_model(tiny_llama(), recipe_of(CPU)), "hf_device_map")


def test_what_it_cannot_prepare_is_named_all_at_once():
    adapted = hf.prepare_model(tiny_llama(), recipe_of("adapter.name=lora"))
    wanted = recipe_of("adapter.name=lora", "model.quantization=nf4")
    with pytest.raises(UserError) as caught:
        hf.prepare_model(adapted, wanted)
    quantised, twice = caught.value.problems
    assert "Pass its name to hf.prepare_model()" in quantised
    assert "got a PEFT model" in twice


def test_an_adapter_of_another_rank_than_the_recipes(tmp_path):
    model = hf.prepare_model(tiny_llama(), recipe_of("adapter.name=lora", "adapter.r=4"))
    trainer, _ = trainer_of(tmp_path, model=model)
    with pytest.raises(UserError, match=r"adapter.r=8 is not what the trainer has, LoraConfig.r=4"):
        hf.attach(trainer, recipe_of("adapter.name=lora", "adapter.r=8"))
    assert hf.attach(trainer, recipe_of()).recipe.adapter.r == 4


def test_accelerate_sends_no_state_through_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr("accelerate.optimizer.move_to_device", lambda *_: pytest.fail("state was moved"))
    trainer, _, _ = attached_trainer(tmp_path, "offload.optimizer=host", fields={"max_steps": 1})
    trainer.train()
    assert trainer.state.global_step == 1
    assert trainer.optimizer.state, "there was state to move"


def test_accelerate_leaves_streamed_weights_on_the_host(tmp_path, monkeypatch):
    placed, prepare_model = [], Accelerator.prepare_model

    def prepared(self, model, device_placement=None, evaluation_mode=False):
        placed.append(device_placement)
        return prepare_model(self, model, device_placement, evaluation_mode)

    monkeypatch.setattr(Accelerator, "prepare_model", prepared)
    streamed = ("adapter.name=lora", "offload.parameters=stream", "checkpointing.mode=full")
    trainer, _, _ = attached_trainer(tmp_path, *streamed, fields={"max_steps": 1})
    trainer.train()
    assert placed == [False]


def test_masters_follow_weights_that_are_loaded_over_them(tmp_path):
    fields = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    settings = ("optimizer.master=split16",)
    attached_trainer(tmp_path, *settings, dtype=torch.bfloat16, fields=fields)[0].train()
    trainer, _, _ = attached_trainer(tmp_path, *settings, dtype=torch.bfloat16, fields=fields)
    optimizer, weight = trainer.optimizer.optimizer, trainer.model.lm_head.weight
    lower = [optimizer.state[weight][name] for name in optimizer.master_of(weight).tensors]
    for bits in lower:
        bits.fill_(1)
    trainer._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
    assert all(bits.count_nonzero() == 0 for bits in lower)
