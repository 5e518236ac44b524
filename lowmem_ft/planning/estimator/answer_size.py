"""Bytes of a model that answers: its weights, and the cache of keys and values, from shapes alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.planning.estimator.runtime import bytes_of_weights, model_on_meta, pack_as_loaded

logger = logging.getLogger(__name__)

_SHORT, _LONG = 8, 16
"""Tokens of two prompts: what differs between their caches grows with tokens, the rest is there once."""


@dataclass(frozen=True, kw_only=True)
class AnswerSize:
    """Bytes of a model that answers.

    Args:
        weight_bytes: its weights, as they are kept.
        cache_bytes: the cache at the context length; None: shapes do not tell it, and a warning says why.
    """

    weight_bytes: int
    cache_bytes: int | None


def size_of_answers(config: ModelConfig, context_length: int) -> AnswerSize:
    """Return what a model takes to answer with so many tokens in its context, adapters left out.

    Args:
        config: names the model, its type and its quantization.
        context_length: tokens of prompt and answer together.

    Raises:
        ModelError: if there is no such model.
    """
    hf_config = load_model_config(config, architecture_only=True)
    model: Any = model_on_meta(config, hf_config).eval()
    # The default, grouped_mm, takes bfloat16 alone where there are no values.
    model.set_experts_implementation("batched_mm")
    cache_bytes = None
    try:
        per_token, once = _cache_of(model)
    except (RuntimeError, _NoLayersError) as error:  # a forward that looks at values, which shapes lack
        why, _, _ = str(error).partition("\n")
        logger.warning("What %s keeps of each token is not known from shapes: %s", type(model).__name__, why)
    else:
        grown = sum(size * min(context_length, window or context_length) for size, window in per_token)
        cache_bytes = grown + once
    pack_as_loaded(model, config, hf_config)
    return AnswerSize(weight_bytes=bytes_of_weights(model), cache_bytes=cache_bytes)


class _NoLayersError(Exception):
    """Error for a cache that does not say which tensors a layer keeps."""


def _cache_of(model: Any) -> tuple[list[tuple[int, int | None]], int]:
    """Return (bytes per token, window) of each layer's growing cache, and the total bytes that do not grow."""
    short, long = (_layers_of(model, length) for length in (_SHORT, _LONG))
    per_token, once = [], 0
    for (few, window), (many, _) in zip(short, long, strict=True):
        growth = (many - few) // (_LONG - _SHORT)
        per_token.append((growth, window))
        once += many - growth * _LONG
    return per_token, max(0, once)


def _layers_of(model: Any, length: int) -> list[tuple[int, int | None]]:
    with torch.no_grad():
        ids_BT = torch.ones((1, length), dtype=torch.int64, device="meta")
        cache = model(input_ids=ids_BT, use_cache=True).past_key_values
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise _NoLayersError(f"its cache, a {type(cache).__name__}, has no layers.")
    return [
        (sum(tensor.nbytes for tensor in _tensors(layer)), getattr(layer, "sliding_window", None))
        for layer in layers
    ]


def _tensors(layer: Any) -> Iterator[torch.Tensor]:
    for value in vars(layer).values():
        if isinstance(value, torch.Tensor):
            yield value
