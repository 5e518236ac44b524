"""Scripts whose trainer shards by Accelerate's FSDP2: their estimates, and the bytes of their ranks."""

from __future__ import annotations

import json
from pathlib import Path

import fsdp2_on_gloo
import pytest
from accelerate.state import PartialState
from measuring.real_ranks import run_ranks_for_real

from lowmem_ft.planning.script_runs import estimate_script

TESTS = Path(fsdp2_on_gloo.__file__).parent

QLORA = """
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from trl import SFTConfig, SFTTrainer

    four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_storage=torch.STORAGE
    )
    model = AutoModelForCausalLM.from_pretrained("model", quantization_config=four_bits, dtype=torch.bfloat16)
    SFTTrainer(
        model,
        args=SFTConfig("out", max_length=64, report_to="none", bf16=True, fsdp=True, fsdp_config={"version": 2}),
        train_dataset=Dataset.from_dict({"text": ["This is a text. " * 8] * 32}),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    ).train()
"""

DPO = """
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    pair = {"prompt": ["What is it?"] * 32, "chosen": ["It is a text. " * 5] * 32, "rejected": ["None. " * 5] * 32}
    arguments = DPOConfig("out", max_length=64, report_to="none", model_init_kwargs={"dtype": "bfloat16"})
    DPOTrainer("model", args=arguments, train_dataset=Dataset.from_dict(pair)).train()
"""


def test_four_bits_that_fsdp2_shards_are_counted_as_the_weights_they_stand_for(script):
    """Stored as bfloat16 they are sharded, and their scales stay with the layers; as bytes they are left whole."""
    sharded = estimate_script(script(QLORA.replace("STORAGE", "bfloat16")), gpu="2xt4")
    whole = estimate_script(script(QLORA.replace("STORAGE", "uint8")), gpu="2xt4")
    assert sharded.estimate.model == whole.estimate.model
    assert sharded.estimate.model.name == "PeftModel"
    assert sharded.estimate.processes.strategy == "fsdp2"
    assert sharded.kept_bytes < whole.kept_bytes


def test_a_reference_model_stays_on_the_gpu_of_its_rank(script):
    """The first rank loads the weights, so the last one runs, too; TRL lets ``device_map`` spread the reference."""
    Path("fsdp.json").write_text(
        json.dumps(fsdp2_on_gloo.launch_config(2, fsdp_cpu_ram_efficient_loading=True)), encoding="utf-8"
    )
    found = estimate_script(script(DPO), gpu="t4", accelerate_config="fsdp.json").estimate
    assert found.processes.strategy == "fsdp2"
    assert 0 < found.processes.last_peak_bytes <= found.process_peak_bytes


SHARE = 0.01
"""What a rank may be off by; the first three are within 0.001%."""

STOCK = """
    from fsdp2_on_gloo import FSDP2, let_gloo_stand_for_gpus
    let_gloo_stand_for_gpus()
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    sizes = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8, vocab_size=8192)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    if LORA:
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    rows = [{"input_ids": [1] * length, "labels": [1] * length} for length in [48] * 8 + [64] * 24]
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True, train_sampling_strategy="sequential", **FSDP2,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
"""

TRAIN = """
    trainer.train()
"""

ATTACH = """
    from lowmem_ft import hf, load_recipe
    hf.attach(trainer, load_recipe(None, ["model=any", "model.dtype=float32", *SETTINGS]))
    trainer.train()
"""
SETTINGS = ["checkpointing.mode=full", "loss.chunk_tokens=32"]

SCRIPTS = {
    "full": STOCK.replace("LORA", "False") + TRAIN,
    "LoRA": STOCK.replace("LORA", "True") + TRAIN,
    "full, attached": STOCK.replace("LORA", "False") + ATTACH.replace("SETTINGS", f"{SETTINGS}"),
    "LoRA, attached": STOCK.replace("LORA", "True") + ATTACH.replace("SETTINGS", f"{SETTINGS}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_each_rank_of_a_trainer_takes_what_its_estimate_says(name, script, monkeypatch):
    """84 MB of weights a rank, which Accelerate shards for real, with torch's own allocator reporting."""
    monkeypatch.setattr(PartialState, "__init__", PartialState.__init__)  # which the scripts replace
    path = script(SCRIPTS[name])
    found = estimate_script(path, gpu="2xcpu")
    assert found.estimate.processes.strategy == "fsdp2"
    phases = {**found.estimate.by_phase}
    assert {"load", "forward", "backward", "optimizer_step"} <= phases.keys()
    for real in run_ranks_for_real(2, path, more={"PYTHONPATH": f"{TESTS}:{TESTS.parent}"}):
        assert found.steps == real.steps == 3
        assert found.kept_bytes == pytest.approx(real.kept_bytes, rel=SHARE)
        assert phases == pytest.approx({phase: real.by_phase[phase] for phase in phases}, rel=SHARE)
