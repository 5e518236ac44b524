"""Adapters in a trainer under FSDP2: no rank keeps a whole weight of the base as it was loaded."""

from __future__ import annotations

import json

import pytest
from fsdp2_on_gloo import launch
from tiny_models import tiny_llama

SIZES = {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": False}

TRAIN = """
import gc, json, os, weakref
import torch
from attached_trainers import recipe_of, rows
from tiny_models import tiny_llama
from peft import LoraConfig, get_peft_model
from sharded_trainers import SHARED
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainerCallback, TrainingArguments, default_data_collator,
)
from lowmem_ft import hf

folder, kind, sizes = sys.argv[1:]
if kind == "qlora":
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, bnb_4bit_quant_storage=torch.float32
    )
    base = AutoModelForCausalLM.from_pretrained(f"{folder}/base", quantization_config=four_bits, dtype=torch.float32)
else:
    base = tiny_llama(**json.loads(sizes))
torch.manual_seed(3)
model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
frozen = {name: weight for name, weight in model.named_parameters() if not weight.requires_grad}
whole = {name: weakref.ref(weight.untyped_storage()) for name, weight in frozen.items()}
tensors = {name: weakref.ref(weight) for name, weight in frozen.items()}
del frozen, base
alive = {}

def look(when):
    gc.collect()
    alive[when] = sorted({name for refs in (whole, tensors) for name, ref in refs.items() if ref() is not None})

class Look(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        look(f"step {state.global_step}")
    def on_save(self, args, state, control, **kwargs):
        look("save")

fields = {**SHARED, "per_device_train_batch_size": 3, "max_steps": 2, "save_strategy": "steps", "save_steps": 2}
trainer = Trainer(
    model, TrainingArguments(f"{folder}/out", **fields), train_dataset=rows(36), data_collator=default_data_collator,
    callbacks=[Look()],
)
hf.attach(trainer, recipe_of("checkpointing.mode=full"))
look("loaded")
trainer.train()
assert isinstance(trainer.model_wrapped, FSDPModule)
print(json.dumps({"all": sorted(whole), "alive": alive}))
"""


@pytest.mark.parametrize("kind", ["lora", pytest.param("qlora", marks=pytest.mark.slow)])
def test_no_rank_keeps_a_whole_weight_of_the_base(kind, forks, tmp_path):
    """From the first step on, and after a save: neither the tensor that was loaded nor its memory."""
    if kind == "qlora":
        tiny_llama(**SIZES).save_pretrained(tmp_path / "base")
    for rank in launch(forks, 2, TRAIN, str(tmp_path), kind, json.dumps(SIZES)):
        assert rank.returncode == 0, rank.stderr
        (line,) = [line for line in rank.stdout.splitlines() if line.startswith('{"all"')]
        seen = json.loads(line)
        assert len(seen["all"]) >= 2 * 7 + 2
        assert seen["alive"].pop("loaded") == seen["all"]
        assert seen["alive"] == {"step 1": [], "step 2": [], "save": []}
