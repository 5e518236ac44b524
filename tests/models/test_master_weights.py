"""What a checkpoint knows beyond bfloat16, for the masters of a run."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from lowmem_ft.models import ModelConfig, load_master_weights, load_model_config

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
}


def save(folder, dtype, hf_config=None):
    model = AutoModelForCausalLM.from_config(hf_config or LlamaConfig(**SIZES), dtype=dtype)
    model.save_pretrained(folder)
    return model


def finer_of(folder, dtype="bfloat16"):
    config = ModelConfig(name_or_path=str(folder), dtype=dtype)
    return load_master_weights(config, load_model_config(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_all_that_the_files_hold_is_there(tmp_path, dtype):
    saved = save(tmp_path, dtype)
    finer = finer_of(tmp_path)
    for name, parameter in saved.named_parameters():
        assert torch.equal(finer.get_parameter(name), parameter.float()), name


def test_experts_are_joined_as_in_the_model(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    saved = save(tmp_path, torch.float32, Qwen3MoeConfig(**SIZES, **experts, num_key_value_heads=2))
    finer = finer_of(tmp_path)
    assert dict(saved.named_parameters()).keys() == dict(finer.named_parameters()).keys()
    name = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(finer.get_parameter(name), saved.get_parameter(name))


def test_there_is_nothing_more_in_a_bfloat16_file_or_for_a_float32_model(tmp_path):
    save(tmp_path / "bf16", torch.bfloat16)
    save(tmp_path / "fp32", torch.float32)
    assert finer_of(tmp_path / "bf16") is None
    assert finer_of(tmp_path / "fp32", dtype="float32") is None
    assert finer_of(tmp_path / "fp32", dtype="auto") is None


def test_norms_in_float32_are_not_worth_a_second_model_in_memory(tmp_path):
    save(tmp_path, torch.bfloat16)
    file = tmp_path / "model.safetensors"
    weights = {
        name: tensor.float() if "norm" in name else tensor.clone() for name, tensor in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    assert finer_of(tmp_path) is None
