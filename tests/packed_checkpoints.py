"""Tiny checkpoints as gpt-oss, DeepSeek-V3 and Qwen3's FP8 models are published: packed weights, and their scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

SHORT = (
    "training.max_steps=2",
    "training.save_steps=1",
    "training.eval_steps=null",
    "training.logging_steps=1",
    "training.lr_scheduler_type=constant",
    "training.per_device_train_batch_size=2",
    "training.gradient_accumulation_steps=2",
)
LOWEST = ("offload.parameters=stream", "checkpointing.mode=full", "accumulation.order=vertical")

BLOCK = (32, 16)
"""Outputs and inputs of a block in FP8; 80 columns of an attention's output and 72 rows are no whole number of them."""

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}

_FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "gpt_oss": (GptOssConfig, {"head_dim": 16, "num_local_experts": 5}),
    "qwen3": (Qwen3Config, {"head_dim": 18, "hidden_size": 72}),
    "qwen3_moe": (Qwen3MoeConfig, {"head_dim": 16, "num_experts": 5, "moe_intermediate_size": 48}),
    "deepseek_v3": (
        DeepseekV3Config,
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "v_head_dim": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
        },
    ),
}
CONFIGS = tuple(_FAMILIES)
"""Families; gpt-oss is published in MXFP4, the others in FP8."""


def packed_checkpoint(family: str, folder: Path, **sizes: Any) -> Path:
    """Write a family's checkpoint, with weights of about 1 / sqrt(inputs)."""
    torch.manual_seed(0)
    config_class, own = _FAMILIES[family]
    model = AutoModelForCausalLM.from_config(config_class(**_SIZES | own | sizes), dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        if name.endswith("_bias"):
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text())
    plain = load_file(folder / "model.safetensors")
    packed: dict[str, Tensor] = {}
    for name, weight in plain.items():
        if family == "gpt_oss" and weight.dim() == 3:
            packed |= _mxfp4(name, weight.transpose(1, 2))
        elif family != "gpt_oss" and weight.dim() == 2 and ".layers." in name and "_proj" in name:
            packed |= _fp8(name, weight)
        else:
            packed[name] = weight
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    fields["quantization_config"] = (
        {"quant_method": "mxfp4", "modules_to_not_convert": left}
        if family == "gpt_oss"
        else {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": BLOCK,
        }
    )
    save_file(
        {name: weight.contiguous() for name, weight in packed.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def _mxfp4(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Any codes do: two a byte, for 32 inputs a byte with their exponent."""
    num_experts, num_outputs, num_inputs = weight.shape
    shape = (num_experts, num_outputs, num_inputs // 32)
    return {
        f"{name}_blocks": torch.randint(0, 256, (*shape, 16), dtype=torch.uint8),
        f"{name}_scales": torch.randint(122, 126, shape, dtype=torch.uint8),
    }


def _fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    """The largest weight of a block becomes the largest of the type, 448."""
    scales = torch.empty(-(-weight.shape[0] // BLOCK[0]), -(-weight.shape[1] // BLOCK[1]))
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = tuple(
                slice(size * index, size * index + size)
                for size, index in zip(BLOCK, (row, column), strict=True)
            )
            scales[row, column] = weight[block].float().abs().max() / 448
            values[block] = (weight[block].float() / scales[row, column]).to(values.dtype)
    return {name: values, f"{name}_scale_inv": scales}
