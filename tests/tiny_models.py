"""Models small enough for any test, the same each time."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

TINY = Path(__file__).parents[1] / "recipes" / "tiny"
"""The config and the tokenizer of the recipe `tiny`."""

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


def model_of(config: PretrainedConfig | Path = TINY, *, seed: int = 0, **arguments: Any) -> PreTrainedModel:
    """A model of this config, or this folder's, for training; ``arguments`` as ``from_config`` takes them."""
    config = AutoConfig.from_pretrained(config) if isinstance(config, Path) else copy.deepcopy(config)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, **arguments).train()


def save_llama(folder: Path, *, layers: int, hidden: int, inner: int, heads: int, **config: Any) -> str:
    """Save the config of a Llama of these sizes, without weights, and return its folder."""
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner}
    LlamaConfig(**sizes, num_attention_heads=heads, **config).save_pretrained(folder)
    return str(folder)


def losses_of_adamw(model, ids, num_steps=3):
    """Train on the same tokens in torch's AdamW, and return the losses."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    losses = []
    for _ in range(num_steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def loss_and_gradients(model, ids):
    """The loss on these tokens, and the gradients of all weights that have one."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
