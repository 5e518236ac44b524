"""Checkpoints of a tower, a projector and a language model, small enough for any test, the same each time."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tiny_models import TINY

TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN3_5_TEXT: dict[str, Any] = {
    **TEXT,
    "layer_types": ["linear_attention", "full_attention"],
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
_QWEN3_5_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {"text_config": {**TEXT, "sliding_window": 64}, "vision_config": VISION, "mm_tokens_per_image": 4},
    ),
    "mistral3": (
        "Mistral3",
        {
            "text_config": {**TEXT, "model_type": "ministral3", "tie_word_embeddings": False},
            "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16},
            "tie_word_embeddings": False,
        },
    ),
    "gemma4": (  # as E4B: inputs of each layer from a table, keys that layers share, and a tower for sound, too
        "Gemma4",
        {
            "text_config": {
                **TEXT,
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_kv_shared_layers": 2,
                "global_head_dim": 32,
                "vocab_size_per_layer_input": TEXT["vocab_size"],
                "hidden_size_per_layer_input": 8,
                "sliding_window": 64,
            },
            "vision_config": {
                **VISION,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "position_embedding_size": 16,
            },
            "audio_config": {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "subsampling_conv_channels": [8, 4],
                "output_proj_dims": 32,
            },
        },
    ),
    "qwen3_5": ("Qwen3_5", {"text_config": _QWEN3_5_TEXT, "vision_config": _QWEN3_5_VISION}),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {
            "text_config": {
                **_QWEN3_5_TEXT,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
            },
            "vision_config": _QWEN3_5_VISION,
        },
    ),
    "llama4": (
        "Llama4",
        {
            "text_config": {
                **TEXT,
                "intermediate_size_mlp": 64,
                "num_local_experts": 2,
                "attention_chunk_size": 128,
                "layer_types": ["chunked_attention", "full_attention"],
                "no_rope_layers": [1, 0],
            },
            "vision_config": {
                **VISION,
                **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32),
            },
        },
    ),
}
PROCESSOR = {
    "preprocessor_config.json": '{"image_processor_type": "SiglipImageProcessor"}',
    "processor_config.json": '{"processor_class": "Gemma3Processor"}',
}


def class_of(family: str) -> Any:
    """The class of the whole model, as its config names it."""
    return getattr(transformers, f"{CONFIGS[family][0]}ForConditionalGeneration")


def several_parts(family: str, folder: Path, **saving: Any) -> Path:
    """A checkpoint as the hub has them, with the tokenizer of the recipe `tiny` and a processor's files."""
    prefix, fields = CONFIGS[family]
    torch.manual_seed(0)
    model = class_of(family)(getattr(transformers, f"{prefix}Config")(**fields))
    for weight in model.parameters():  # some are not initialised
        if not weight.isfinite().all() or weight.abs().max() > 10:
            torch.nn.init.normal_(weight, std=0.02)
    model.save_pretrained(folder, **saving)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, folder / name)
    for name, content in PROCESSOR.items():
        (folder / name).write_text(content)
    return folder


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model folder by their names in its files."""
    return {
        name: tensor
        for file in sorted(folder.glob("model*.safetensors"))
        for name, tensor in load_file(file).items()
    }
