"""What a checkpoint knows beyond bfloat16, for the masters of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from lowmem_ft.foundation.units import KIB, MIB
from lowmem_ft.models import other_parts
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.models.master_weights import load_master_weights

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


def read(finer, name, num_elements):
    """All of a parameter, flat, in pieces that end within pages."""
    values, step = finer.values(name), num_elements // 3 + 1
    return torch.cat(
        [values(start, min(start + step, num_elements)) for start in range(0, num_elements, step)]
    )


def mapped_bytes_in_memory(folder):
    """Of the files in a folder, as this process has them mapped: pages of libraries are the system's to choose."""
    in_folder, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):  # the next mapping: addresses, and at the end its file
            in_folder = values[-1].startswith(f"{folder}/")
        elif in_folder and name == "Rss:":
            found += int(values[0]) * KIB
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_all_that_the_files_hold_is_there(tmp_path, dtype):
    saved = save(tmp_path, dtype)
    finer = finer_of(tmp_path)
    for name, parameter in saved.named_parameters():
        assert torch.equal(read(finer, name, parameter.numel()), parameter.float().flatten()), name


def test_experts_are_joined_as_in_the_model(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    saved = save(tmp_path, torch.float32, Qwen3MoeConfig(**SIZES, **experts, num_key_value_heads=2))
    finer = finer_of(tmp_path)
    for name, parameter in saved.named_parameters():
        assert torch.equal(read(finer, name, parameter.numel()), parameter.flatten()), name


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system alone decides which pages stay")
def test_what_has_been_read_of_a_file_does_not_stay_in_memory(tmp_path):
    """Or the whole checkpoint would be resident beside weights, masters and state, where a load has its peak."""
    weight = save(tmp_path, torch.float32, LlamaConfig(**SIZES | {"vocab_size": 256 * KIB})).lm_head.weight
    assert weight.nbytes == 32 * MIB
    finer = finer_of(tmp_path)
    assert mapped_bytes_in_memory(tmp_path) < 8 * MIB
    assert torch.equal(read(finer, "lm_head.weight", weight.numel()), weight.flatten())
    assert mapped_bytes_in_memory(tmp_path) < 8 * MIB


class ReadAhead:
    """A tensor that is in memory before anybody has looked at it: how much safetensors reads ahead is its choice."""

    def __init__(self, values):
        self._values = values
        self.get_shape, self.get_dtype = values.get_shape, values.get_dtype

    def __getitem__(self, index):
        tensor = self._values[index]
        assert tensor.isfinite().all()
        return tensor


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system alone decides which pages stay")
def test_what_is_read_ahead_of_a_file_does_not_stay_in_memory(tmp_path, monkeypatch):
    save(tmp_path, torch.float32, LlamaConfig(**SIZES | {"vocab_size": 128 * KIB}))
    mapped = other_parts.lazy_weights
    monkeypatch.setattr(
        other_parts,
        "lazy_weights",
        lambda *args, **source: {name: ReadAhead(values) for name, values in mapped(*args, **source).items()},
    )
    finer = finer_of(tmp_path)
    assert finer is not None
    assert mapped_bytes_in_memory(tmp_path) < 8 * MIB


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
