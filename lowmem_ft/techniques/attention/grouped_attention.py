"""Keys and values repeated for each query head, where grouped heads would miss the fused attention kernels.

Transformers lets ``scaled_dot_product_attention`` share a key head among a group of query heads. Before torch 2.14 only
the flash and cuDNN kernels can, which need compute capability 8.0 and a 16-bit type: on a T4, and in float32 on every
GPU, torch falls back to unfused operators, which keep scores of tokens x tokens for every head. The memory-efficient
kernel runs there once each head has keys of its own.

Frees: the scores, heads x tokens x tokens of a layer. Costs: keys and values as large as the queries.
Equals: the same attention; kernels round differently.

Axes: B rows, T tokens, H query heads, K key heads, D head size.
"""

from __future__ import annotations

import functools
import inspect
import re
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.flash_attention import get_target_dtype
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from lowmem_ft.foundation.devices import compute_capability, kernels_of
from lowmem_ft.foundation.upstream.attention_choice import SdpaCall, choose_sdpa
from lowmem_ft.foundation.upstream.layer_configs import layer_configs

REPEATED_HEADS = "sdpa_repeated_heads"
"""The ``attn_implementation`` under which transformers knows this attention."""


@functools.cache
def _needs_repeated_heads(
    heads: int, key_heads: int, size: int, dtype: torch.dtype, compute_capability: tuple[int, int]
) -> bool:
    """Return whether grouped heads keep torch from a fused kernel that takes separate heads.

    Args:
        heads: query heads.
        key_heads: heads of keys and values.
        size: elements of a head.
        dtype: the type of queries and keys.
        compute_capability: the CUDA device's.
    """

    def kernel(key_heads: int) -> str:
        query, key = (
            torch.empty(1, count, 16, size, dtype=dtype, device="meta", requires_grad=True)
            for count in (heads, key_heads)
        )
        is_grouped = key_heads < heads
        call = SdpaCall(query, key, key, is_causal=True, enable_gqa=is_grouped, capability=compute_capability)
        return choose_sdpa(call).backend

    return key_heads < heads and kernel(key_heads) == "math" != kernel(heads)


def model_needs_repeated_heads(
    config: PreTrainedConfig, dtype: torch.dtype, compute_capability: tuple[int, int]
) -> bool:
    """Return whether a model's heads are grouped so; False if its config does not tell."""
    return any(
        _layer_needs_repeated_heads(layer, dtype, compute_capability)
        for layer in layer_configs(config.get_text_config())
    )


def _layer_needs_repeated_heads(config: Any, dtype: torch.dtype, compute_capability: tuple[int, int]) -> bool:
    heads = getattr(config, "num_attention_heads", None) or 1
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    return _needs_repeated_heads(heads, key_heads, size, dtype, compute_capability)


def classes_of(config: PreTrainedConfig) -> tuple[type, ...]:
    """Return transformers' classes of causal models with such a config; none for remote code."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return ()
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found if isinstance(found, tuple) else (found,)


def reads_its_attentions_name(config: PreTrainedConfig) -> bool:
    """Return whether a model's own code asks for ``sdpa`` by name, or may: it would not know another one.

    Args:
        config: the model's config. What transformers does not know (remote code) may ask.
    """
    classes = classes_of(config)
    if not classes:
        return True
    sources = (inspect.getsource(inspect.getmodule(cls) or cls) for cls in classes)
    return any(
        re.search(r"_attn_implementation (==|!=|in|not in) [^\n]*\bsdpa\b", source) for source in sources
    )


def documented_name(implementation: str) -> str:
    """Return the name by which a recipe asks for an attention that a model has: sdpa with repeated heads is sdpa."""
    return "sdpa" if implementation == REPEATED_HEADS else implementation


@functools.cache
def register_repeated_heads() -> None:
    """Register the implementation with transformers, once per process. Its masks are those of sdpa."""
    AttentionInterface.register(REPEATED_HEADS, _repeated_heads_forward)
    AttentionMaskInterface.register(REPEATED_HEADS, sdpa_mask)


def _repeated_heads_forward(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' sdpa does, with a key head for each query head: B x T x H x D."""
    group = query_BHTD.size(1) // key_BKTD.size(1)
    ungrouped: Any = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    return sdpa_attention_forward(
        ungrouped,
        query_BHTD,
        repeat_kv(key_BKTD, group),
        repeat_kv(value_BKTD, group),
        attention_mask,
        **kwargs,
    )


def target_dtype(query: Tensor, module: nn.Module) -> torch.dtype:
    """Return the type that attention computes in: autocast's, that of a linear layer around it, or the query's."""
    has_linear = any(isinstance(layer, nn.Linear) for layer in module.modules())  # GPT-2's has none
    if query.dtype == torch.float32 and not has_linear and not torch.is_autocast_enabled(query.device.type):
        return query.dtype
    return get_target_dtype(query, module) or query.dtype


def causal_attention(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    *,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """Compute causal attention of rows of one document each, with repeated heads where a fused kernel needs them.

    Args:
        module: the attention layer.
        query_BHTD: queries.
        key_BKTD: keys; K divides H.
        value_BKTD: values.
        dropout: on scores.
        scaling: factor on the scores; None: one over the square root of D.

    Returns:
        The output, B x T x H x D.
    """
    device = query_BHTD.device
    dtype = target_dtype(query_BHTD, module)
    repeats = kernels_of(device) == "cuda" and _needs_repeated_heads(
        query_BHTD.size(1), key_BKTD.size(1), query_BHTD.size(3), dtype, compute_capability(device)
    )
    forward = _repeated_heads_forward if repeats else sdpa_attention_forward
    return forward(
        module, query_BHTD, key_BKTD, value_BKTD, None, dropout=dropout, scaling=scaling, is_causal=True
    )[0]
