"""Models small enough for any test, the same each time."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

FAMILY_SIZES: dict[str, Any] = {
    **SIZES,
    "vocab_size": 120,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""For techniques that are held to many architectures: heads share keys and values, tokens have their usual numbers."""


def tiny_llama(dtype: torch.dtype = torch.float32, **config: Any) -> PreTrainedModel:
    """A Llama for training; what its config has in place of :data:`SIZES`, or beside them, is given by name."""
    return model_of(LlamaConfig(**{**SIZES, **config}), dtype=dtype)


def model_of(config: PretrainedConfig, **arguments: Any) -> PreTrainedModel:
    """A model of this config for training; ``arguments`` as ``from_config`` takes them."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), **arguments).train()
