"""QLoRA of a mixture whose experts are packed: streamed, stopped and resumed, merged, and estimated."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from measuring.comparison import compare, estimated_peaks
from measuring.real_run import run_for_real
from packed_checkpoints import LOWEST, SHORT
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.export.merging import merge_into_base
from lowmem_ft.training.run.loop import train

NF4 = (
    "adapter.name=lora",
    "adapter.r=4",
    "model.quantization=nf4",
    "model.dtype=bfloat16",
    "training.mixed_precision=bf16",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    tokenizer = AutoTokenizer.from_pretrained(
        load_recipe("tiny").model.tokenizer_name_or_path or "recipes/tiny"
    )
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def run(tiny, base, tmp_path):
    def train_one(name, *settings):
        recipe = tiny(
            f"model={base}", "model.weights=pretrained", *SHORT, *NF4, *settings, output_dir=tmp_path / name
        )
        return train(recipe)

    return train_one


INT8 = "model.quantization=int8"
EXPERTS = "adapter.target_parameters=[mlp.experts.gate_up_proj, mlp.experts.down_proj]"


@pytest.mark.parametrize(
    "adapted", [(), (EXPERTS,), (EXPERTS, INT8)], ids=["experts frozen", "experts adapted", "8 bits"]
)
def test_the_lowest_rung_and_a_resumed_run_learn_what_the_plain_one_learns(run, metrics, tmp_path, adapted):
    run("plain", *adapted)
    run("lowest", *adapted, *LOWEST)
    run("parted", *adapted, "training.max_steps=1")
    run("parted", *adapted, "training.resume_from_checkpoint=auto")
    plain, lowest = (
        load_file(tmp_path / name / "model" / "adapter_model.safetensors") for name in ("plain", "lowest")
    )
    assert metrics(tmp_path / "parted")[1:] == metrics(tmp_path / "plain")[1:]
    parted = load_file(tmp_path / "parted" / "model" / "adapter_model.safetensors")
    assert all(torch.equal(parted[name], plain[name]) for name in plain)
    for one, other in zip(metrics(tmp_path / "lowest"), metrics(tmp_path / "plain"), strict=True):
        assert one == pytest.approx(other, rel=1e-3)  # sums of gradients in another order, in bfloat16
    assert lowest.keys() == plain.keys()
    assert sum("experts" in name for name in plain) == (8 if adapted else 0)
    config = json.loads((tmp_path / "plain" / "model" / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("adapted", [(), (EXPERTS,)], ids=["experts frozen", "experts adapted"])
def test_the_merged_model_has_the_experts_of_the_base_unless_they_are_adapted(run, base, tmp_path, adapted):
    result = run("merged", *adapted)
    merge_into_base(result.model_folder, tmp_path / "whole")
    merged, own = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "whole", base))
    for name, weight in own.named_parameters():
        assert torch.equal(merged.get_parameter(name), weight) == (
            "_proj" not in name or ("experts" in name and not adapted)
        ), name


@pytest.mark.parametrize(
    "settings",
    [(), LOWEST, (EXPERTS,), (EXPERTS, *LOWEST)],
    ids=["plain", "lowest", "experts adapted", "experts adapted, lowest"],
)
def test_the_estimate_is_what_a_step_takes(base, settings):
    batch = ("data=any", "data.max_length=64", "training.gradient_accumulation_steps=2")
    recipe = load_recipe(None, [f"model={base}", "model.weights=random", *batch, *NF4, *settings])
    measured = dataclasses.asdict(run_for_real(recipe))
    compared = compare("", measured, estimated_peaks(estimate_memory(recipe, None)))
    for one in compared:
        if one.metric == "allocated":
            assert one.estimated_bytes == pytest.approx(one.measured_bytes, rel=0.005), one.phase
