"""A model small enough for any test, the same each time."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def tiny_llama(dtype: torch.dtype = torch.float32, **config: Any) -> PreTrainedModel:
    """A Llama for training; what its config has in place of :data:`SIZES`, or beside them, is given by name."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, **config}), dtype=dtype)
    return model.train()
