"""A recipe inside SFTTrainer where a model reads images: TRL's losses, its own files, and by name what does not go."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from attached_trainers import SAME_LOSSES, SAME_NORMS, Meter, arguments, problems_of, recipe_of
from peft import LoraConfig
from sweeps import few_quick
from tiny_pictures import FAMILIES, is_of_tower, picture_rows, seeing
from transformers import AutoModelForImageTextToText, AutoProcessor, BitsAndBytesConfig, PrinterCallback
from trl import SFTConfig, SFTTrainer

from lowmem_ft import hf
from lowmem_ft.planning.script_recipes.loss_probe import LossProbe
from lowmem_ft.techniques.modules.model_parts import ModelParts

TECHNIQUES = (
    "loss.chunk_tokens=16",
    "checkpointing.mode=full",
    "offload.activations=inputs",
    "offload.optimizer=host",
    "tiling.mlp=2",
)


def sft(folder, model, processor, *, adapters=False, **fields):
    """A trainer of three steps by TRL's own collator, with PEFT's adapters everywhere or none, and what it logs."""
    meter = Meter()
    fields = arguments(**{"max_steps": 3, "bf16": False, "max_length": None, "weight_decay": 0.1, **fields})
    trainer = SFTTrainer(
        model,
        args=SFTConfig(str(folder), **fields),
        train_dataset=picture_rows(),
        processing_class=processor,
        callbacks=[meter],
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if adapters else None,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, meter


def losses_and_norms(folder, family, *settings, attached=True, frozen=True, **how):
    trainer, meter = sft(folder, *seeing(family, frozen=frozen), **how)
    if attached:
        hf.attach(trainer, recipe_of(*settings))
    trainer.train()
    return meter


@pytest.mark.parametrize(
    "family, how",
    [
        *few_quick(
            ((family, {}) for family in FAMILIES), (("gemma3", {}), ("qwen2_5_vl", {}), ("qwen3_5", {}))
        ),
        ("llava_onevision", {"adapters": True}),
        ("qwen2_5_vl", {"adapters": True}),
        ("gemma3", {"frozen": False}),
    ],
)
def test_a_model_that_reads_images_trains_as_trl_trains_it(family, how, tmp_path):
    stock = losses_and_norms(tmp_path, family, attached=False, **how)
    meter = losses_and_norms(tmp_path, family, *TECHNIQUES, **how)
    assert meter.losses == pytest.approx(stock.losses, abs=SAME_LOSSES)
    assert meter.norms == pytest.approx(stock.norms, rel=SAME_NORMS)


def test_trls_own_head_and_selective_checkpointing_go_too(tmp_path):
    stock = losses_and_norms(tmp_path, "llava_onevision", attached=False)
    meter = losses_and_norms(
        tmp_path, "llava_onevision", "loss.chunk_tokens=null", "checkpointing.mode=selective"
    )
    assert meter.losses == pytest.approx(stock.losses, abs=SAME_LOSSES)


def test_updates_in_backward_of_bfloat16_weights_leave_the_tower_as_it_is(tmp_path):
    """With masters, so that they are those of float32 up to the rounding of products."""
    model, processor = seeing("gemma3", dtype=torch.bfloat16)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    trainer, meter = sft(tmp_path, model, processor, gradient_accumulation_steps=1)
    hf.attach(trainer, recipe_of("optimizer.in_backward=true", dtype=torch.bfloat16))
    trainer.train()
    stock = losses_and_norms(tmp_path, "gemma3", attached=False, gradient_accumulation_steps=1)
    assert meter.losses == pytest.approx(stock.losses, abs=0.05)
    same = {name for name, weight in model.named_parameters() if weight.equal(before[name])}
    assert same == {name for name in before if is_of_tower(name)}


def test_packed_in_four_bits_it_trains_adapters_as_trl_does(tmp_path):
    """Up to the rounding of bfloat16 gradients, of which TRL's norm keeps three digits."""
    model, processor = seeing("llava_onevision", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    packed = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )

    def losses(*settings):
        model = AutoModelForImageTextToText.from_pretrained(
            tmp_path / "model", quantization_config=packed, dtype=torch.bfloat16
        )
        trainer, meter = sft(tmp_path, model, processor, adapters=True)
        if settings:
            hf.attach(trainer, recipe_of(*settings, dtype=torch.bfloat16))
        trainer.train()
        return meter.losses

    assert losses(*TECHNIQUES) == pytest.approx(losses(), abs=1e-3)


def test_what_belongs_to_text_alone_is_refused_all_at_once(tmp_path):
    one = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    trainer, _ = sft(tmp_path, *seeing("llava_onevision"), **one)
    streamed = ("offload.parameters=stream", "offload.optimizer=host", "optimizer.in_backward=true")
    vertical = ("accumulation.order=vertical", "checkpointing.mode=full")
    problems = problems_of(trainer, *streamed, *vertical)
    (rows,) = [one for one in problems if one.startswith("accumulation.order=vertical")]
    assert "pictures or sound of all rows are one tensor to LlavaOnevisionForConditionalGeneration" in rows
    assert rows.endswith("Set accumulation.order=horizontal.")
    (stacks,) = [one for one in problems if one.startswith("offload.parameters=stream")]
    assert "has 2: model.vision_tower.encoder.layers, model.language_model.layers" in stacks
    assert stacks.endswith("Set offload.parameters=device.")


def test_prepared_adapters_are_beside_layers_of_text(tmp_path):
    recipe = recipe_of("adapter.name=lora", "adapter.r=4", "checkpointing.mode=full")
    model, processor = seeing("llava_onevision", frozen=False)
    prepared = hf.prepare_model(model, recipe)
    trained = {name for name, weight in prepared.named_parameters() if weight.requires_grad}
    assert trained
    assert all("model.language_model.layers." in name and ".lora_" in name for name in trained)
    trainer, meter = sft(tmp_path, prepared, processor)
    hf.attach(trainer, recipe)
    trainer.train()
    assert meter.losses[-1] < meter.losses[0]


def test_trls_switch_turns_recomputation_of_the_tower_off_and_on_with_that_of_the_text(tmp_path):
    model, processor = seeing("idefics3")
    trainer, _ = sft(tmp_path, model, processor, adapters=True)
    hf.attach(trainer, recipe_of("checkpointing.mode=full", "checkpointing.skip_last_layers=1"))
    of_text, (tower,) = ModelParts(model).text_layers(), ModelParts(model).towers

    def recomputed():
        return [layer.gradient_checkpointing for layer in (*of_text, *tower)]

    assert recomputed() == [True, False, True, True]
    trainer.model.gradient_checkpointing_disable()
    assert not any(recomputed())
    trainer.model.gradient_checkpointing_enable()
    assert recomputed() == [True, False, True, True]


@pytest.mark.parametrize("family", few_quick(FAMILIES, ("gemma4", "qwen3_vl")))
def test_whether_its_loss_may_be_chunked_is_seen_without_its_weights(family):
    assert LossProbe(seeing(family)[0]).can_be_chunked()


EVERY_STEP = {"save_strategy": "steps", "save_steps": 1}
PROGRAM = f"""
import os, signal, sys
sys.path[:0] = [{str(Path(__file__).parents[1])!r}, {str(Path(__file__).parent)!r}]
from test_attach_pictures import EVERY_STEP, TECHNIQUES, hf, recipe_of, seeing, sft
from transformers.trainer_utils import get_last_checkpoint

folder, moment = sys.argv[1:]

def die(*_, **__):
    if trainer.state.global_step >= 2:
        os.kill(os.getpid(), signal.SIGKILL)

def when_it_comes_back(layer, inputs, hidden):
    if hidden.requires_grad:
        hidden.register_hook(die)

model, processor = seeing("idefics3")
trainer, _ = sft(folder, model, processor, **EVERY_STEP)
hf.attach(trainer, recipe_of(*TECHNIQUES))
if moment == "a save":
    trainer._save_scaler = die
else:
    model.model.text_model.layers[0].register_forward_hook(when_it_comes_back)
trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) is not None)
"""


def test_killed_in_backward_and_in_a_save_it_goes_on_bit_for_bit_and_is_saved_whole(forks, tmp_path):
    """With its processor: transformers alone loads both."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    for moment in ("a save", "backward"):
        assert forks.run(PROGRAM, str(killed), moment).returncode == -signal.SIGKILL
    saved = []
    for folder in (killed, whole):
        trainer, _ = sft(folder, *seeing("idefics3"), **EVERY_STEP)
        hf.attach(trainer, recipe_of(*TECHNIQUES))
        trainer.train(resume_from_checkpoint=folder == killed)
        assert trainer.state.global_step == 3
        saved.append(AutoModelForImageTextToText.from_pretrained(folder / "checkpoint-3"))
    model, other = saved
    assert all(weight.equal(other.state_dict()[name]) for name, weight in model.state_dict().items())
    assert model.state_dict().keys() == trainer.model.state_dict().keys()
    processor = AutoProcessor.from_pretrained(killed / "checkpoint-3")
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}]
    prompt = processor.apply_chat_template(chat)
    inputs = processor(text=prompt, images=picture_rows(1)[0]["images"], return_tensors="pt")
    assert model(**inputs).logits.isfinite().all()
