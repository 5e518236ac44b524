"""Models that are quantised, adapted or kept on the host before a trainer's constructor sees them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from attached_trainers import TINY, attached_trainer, recipe_of, trainer_of
from packed_checkpoints import packed_checkpoint
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_llama
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen3MoeConfig,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig

from lowmem_ft import hf, load_recipe
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.training.run.loop import TrainingRun

CPU = "training.use_cpu=true"


@pytest.fixture
def float32_folder(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "float32")
    return str(tmp_path / "float32")


def masters_of(trainer, name):
    """The float32 values that a weight is trained from."""
    optimizer, weight = trainer.optimizer.optimizer, trainer.model.get_parameter(name)
    return (
        optimizer.master_of(weight)
        .read(weight.detach().flatten(), optimizer.state[weight])
        .view(weight.shape)
    )


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


def test_masters_begin_with_the_bits_that_bfloat16_weights_have_lost(float32_folder, tmp_path):
    settings = [f"model={float32_folder}", "model.dtype=bfloat16", "optimizer.master=split16", CPU]
    recipe = load_recipe(None, settings)
    model = hf.prepare_model(float32_folder, recipe)
    trainer, _ = trainer_of(tmp_path / "run", model=model)
    handle = hf.attach(trainer, recipe)
    assert torch.equal(masters_of(trainer, "lm_head.weight"), tiny_llama().lm_head.weight)
    handle.remove()


def test_a_streamed_model_is_marked_as_placed():
    streamed = recipe_of("offload.parameters=stream", "adapter.name=lora", "checkpointing.mode=full", CPU)
    assert hf.prepare_model(tiny_llama(), streamed).get_base_model().hf_device_map == {
        "": torch.device("cpu")
    }
    assert not hasattr(hf.prepare_model(tiny_llama(), recipe_of(CPU)), "hf_device_map")


@pytest.mark.parametrize("make", [hf.training_arguments, hf.sft_config])
def test_a_trainer_leaves_a_streamed_model_alone_without_a_word(make, tmp_path, caplog):
    """With arguments of ours; others say that the model is on multiple devices, which it is not."""
    recipe = recipe_of("offload.parameters=stream", "adapter.name=lora", "checkpointing.mode=full", CPU)
    args = make(recipe, output_dir=str(tmp_path), report_to=[])
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    try:
        Trainer(model=hf.prepare_model(tiny_llama(), recipe), args=args)
        assert "multiple devices" not in caplog.text
        Trainer(
            model=hf.prepare_model(tiny_llama(), recipe), args=TrainingArguments(str(tmp_path), use_cpu=True)
        )
        assert "multiple devices" in caplog.text
    finally:
        library.removeHandler(caplog.handler)
    torch.save(args, tmp_path / "args.bin")
    plain = type(torch.load(tmp_path / "args.bin", weights_only=False))
    assert plain in (TrainingArguments, SFTConfig), "it is read without us"


def test_what_it_cannot_prepare_is_named_all_at_once():
    adapted = hf.prepare_model(tiny_llama(), recipe_of("adapter.name=lora"))
    wanted = recipe_of("adapter.name=lora", "model.quantization=nf4")
    with pytest.raises(UserError) as caught:
        hf.prepare_model(adapted, wanted)
    quantised, twice = caught.value.problems
    assert "Pass its name to hf.prepare_model()" in quantised
    assert "got a PEFT model" in twice


def test_adapters_beside_a_head_of_ones_own_are_the_trainers():
    model = AutoModelForSequenceClassification.from_config(tiny_llama().config)
    with pytest.raises(
        UserError, match=r"got LlamaForSequenceClassification, .* Pass peft_config=peft.LoraConfig"
    ):
        hf.prepare_model(model, recipe_of("adapter.name=lora"))


def test_an_adapter_of_another_rank_than_the_recipes(tmp_path):
    model = hf.prepare_model(tiny_llama(), recipe_of("adapter.name=lora", "adapter.r=4"))
    trainer, _ = trainer_of(tmp_path, model=model)
    with pytest.raises(
        UserError, match=r"adapter.r=8 is decided as a model is made, and the trainer's has 4"
    ):
        hf.attach(trainer, recipe_of("adapter.name=lora", "adapter.r=8"))
    assert hf.attach(trainer, recipe_of()).recipe.adapter.r == 4


def test_adapters_of_experts_are_the_recipes(tmp_path):
    experts = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=16,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )
    lora = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=list(experts))
    trainer, _ = trainer_of(tmp_path, model=get_peft_model(AutoModelForCausalLM.from_config(config), lora))
    own = ["adapter.name=lora", "adapter.r=4", "adapter.lora_alpha=8", "adapter.target_modules=[q_proj]"]
    with pytest.raises(UserError, match=r"target_parameters=\S*down_proj\S* is decided as a model is made"):
        hf.attach(trainer, recipe_of(*own, "adapter.target_parameters=[mlp.experts.down_proj]"))
    attached = hf.attach(trainer, recipe_of(*own, f"adapter.target_parameters=[{','.join(experts)}]"))
    assert attached.recipe.adapter.target_parameters == experts


def test_packed_weights_are_not_trained_themselves(tmp_path):
    with pytest.raises(UserError, match=r"is frozen and needs adapter\.name=lora to train"):
        hf.prepare_model(str(packed_checkpoint("qwen3", tmp_path)), recipe_of())


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


def adapters_of(model):
    return [value.detach() for name, value in model.named_parameters() if "lora_A" in name]


def test_adapters_are_those_of_our_own_session_whatever_has_drawn_before(tmp_path):
    """By the recipe's seed, so that all processes have the same; in float32 beside weights of 16 bits, too."""
    settings = ["adapter.name=lora", "model.dtype=bfloat16", "training.seed=3", CPU]
    recipe = load_recipe("tiny", [*settings, f"training.output_dir={tmp_path}", "budget.preflight=false"])
    run = TrainingRun.build(recipe)
    ours = adapters_of(run.session.unwrapped_model)
    run.session.close()
    torch.manual_seed(11)
    prepared = hf.prepare_model(recipe.model.name_or_path, recipe)
    drawn = torch.rand(1)
    torch.manual_seed(11)
    assert torch.equal(torch.rand(1), drawn), "somebody else's random numbers are left alone"
    assert len(ours) == 14
    assert all(torch.equal(one, other) for one, other in zip(ours, adapters_of(prepared), strict=True))
    assert ours[0].dtype == torch.float32


def test_two_processes_have_the_same_adapters(forks):
    program = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parents[1])!r}]
import torch
from attached_trainers import recipe_of
from lowmem_ft import hf
from packed_checkpoints import packed_checkpoint
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_llama
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Trainer, TrainingArguments
from trl import SFTConfig
torch.manual_seed(torch.seed())
model = hf.prepare_model(tiny_llama(), recipe_of("adapter.name=lora"))
print(sum(parameter.double().sum().item() for parameter in model.parameters()).hex())
"""
    one, other = (forks.run(program) for _ in range(2))
    assert one.returncode == 0, one.stderr
    assert one.stdout == other.stdout


@pytest.mark.parametrize("master", ["fp32", "split16", "split24"])
def test_weights_that_were_changed_since_they_were_read_stay_changed(
    master, float32_folder, tmp_path, caplog
):
    """Element by element: the others begin with the bits of the checkpoint."""
    settings = [f"model={float32_folder}", "model.dtype=bfloat16", f"optimizer.master={master}", CPU]
    recipe = load_recipe(None, settings)
    model = hf.prepare_model(float32_folder, recipe)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[2] = 0.75
    name = "model.layers.0.mlp.up_proj.weight"
    names = ["lm_head.weight", "model.embed_tokens.weight", name]
    resized = {one: model.get_parameter(one).detach().clone() for one in names[:2]}
    trainer, _ = trainer_of(tmp_path / "run", model=model)
    with caplog.at_level(logging.INFO, "lowmem_ft"):
        hf.attach(trainer, recipe)
    assert all(torch.equal(model.get_parameter(one), resized[one]) for one in resized)
    expected = tiny_llama().get_parameter(name).detach().clone()
    expected[2] = 0.75
    value = masters_of(trainer, name)
    assert torch.equal(value[2], expected[2])
    tolerance = {"fp32": 0.0, "split16": 0.0, "split24": 2**-15}[master]  # 16 bits, rounded at random
    assert torch.allclose(value, expected, rtol=tolerance, atol=0)
    assert (
        f"except for lm_head.weight, model.embed_tokens.weight, {name}, which have changed since"
        in caplog.text
    )


def test_keys_that_only_whole_runs_follow_are_refused(tmp_path):
    settings = ("adapter.name=lora", "adapter.modules_to_save=[embed_tokens]", "model.add_tokens=[drizzle]")
    says = r"(?s)modules_to_save is for runs of lowmem-ft.*model.add_tokens is for runs of lowmem-ft"
    with pytest.raises(UserError, match=says):
        hf.prepare_model(str(TINY), load_recipe(None, [f"model={TINY}", CPU, *settings]))
    trainer, _ = trainer_of(tmp_path, model=tiny_llama())
    with pytest.raises(UserError, match=r"model\.add_tokens is for runs of lowmem-ft"):
        hf.attach(trainer, recipe_of("model.add_tokens=[drizzle]"))
