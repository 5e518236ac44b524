"""Tiny models of every family that the estimator is tested on: the architecture's own code at a size for a CPU.

Heads share keys and values, windows are shorter than the rows, vocabularies are no round number, and layers differ
where they differ in the family: the tiny model has every behaviour of a large one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

VOCABULARY = 503
MAX_POSITIONS = 256

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED: dict[str, Any] = {**_SIZES, "intermediate_size": 176, "num_key_value_heads": 2}
_GEMMA: dict[str, Any] = {**_GROUPED, "head_dim": 32, "sliding_window": 32}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "qwen2": {**_GROUPED, "tie_word_embeddings": True},
    "qwen3": {**_GROUPED, "head_dim": 32},
    "gemma2": {**_GEMMA, "query_pre_attn_scalar": 32},
    "gemma3": {
        **_GEMMA,
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "mistral": {**_GROUPED, "sliding_window": 48},
    "phi": {**_SIZES, "intermediate_size": 256},
    "phi3": _GROUPED,
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_positions": MAX_POSITIONS,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "olmo2": _GROUPED,
    "gpt_neox": {**_SIZES, "intermediate_size": 256},
    "falcon": {**_SIZES, "num_hidden_layers": 3, "multi_query": True, "parallel_attn": True, "bias": False},
    "qwen3_moe": {**_GROUPED, **_EXPERTS, "head_dim": 32, "num_experts": 4, "moe_intermediate_size": 48},
    "mixtral": {**_GROUPED, **_EXPERTS, "num_local_experts": 4},
}
"""Fields of each config; the family's name is its model type unless another is given."""


def write_families(folder: Path) -> None:
    """Write each family's ``config.json`` into a folder of its name; ``model=FOLDER/NAME`` finds it there."""
    for name, fields in FAMILIES.items():
        AutoConfig.for_model(**{"model_type": name, **fields}).save_pretrained(folder / name)
