"""What a checkpoint knows of weights beyond the type that they are loaded in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from lowmem_ft.models.checkpoint_files import causal_lm_class, lazy_weights
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.loading import load_model, source_of, weights_dtype

_FINER_THAN_BFLOAT16 = {"F16", "F32", "F64"}
"""Types of safetensors with more than 8 bits of mantissa."""


def load_master_weights(config: ModelConfig, hf_config: PretrainedConfig) -> PreTrainedModel | None:
    """The model once more, in float32, on the host, if the checkpoint is finer than its bfloat16 weights.

    A master weight that began with the rounded one would have all its lower bits zero: until the updates of many steps
    have added up to half a bfloat16 unit, hardly a weight would move.

    Args:
        config: the recipe's model group.
        hf_config: what ``load_model_config`` returned for it.

    Returns:
        The model, its float32 weights mapped from the files and so not in memory until they are read; those of other
        types, and of GGUF files, take 4 bytes each. None if ``load_model`` has rounded nothing, or only the smaller
        part of the weights (some checkpoints have norms alone in float32): it is not worth those bytes.

    Raises:
        ModelError: if the weights cannot be read.
    """
    if config.weights == "random" or weights_dtype(config, hf_config) != torch.bfloat16:
        return None
    source = source_of(config)
    if "gguf_file" in source:
        in_float32 = dataclasses.replace(config, dtype="float32")
        return load_model(
            in_float32, hf_config, attn_implementation="eager", device=torch.device("cpu"), seed=0
        )
    del source["trust_remote_code"]  # decided when the config was read
    path = source.pop("path")
    weights = lazy_weights(path, backend="mmap", **source)
    if _finer_share(weights.values()) < 0.5:
        return None
    model_class: Any = causal_lm_class(hf_config, path, **source)
    return model_class.from_pretrained(None, state_dict=weights, config=hf_config, dtype=torch.float32)


def _finer_share(weights: Iterable[Any]) -> float:
    """Of all elements, those that bfloat16 rounds."""
    finer = total = 0
    for weight in weights:
        num_elements = math.prod(weight.get_shape())
        total += num_elements
        finer += num_elements * (weight.get_dtype() in _FINER_THAN_BFLOAT16)
    return finer / max(1, total)
