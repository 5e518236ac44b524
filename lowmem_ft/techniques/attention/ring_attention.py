"""Ring attention: each process has some tokens of a row, and the keys and values of all others pass by in turn.

The ring, its order and the merging of its parts are torch's (``torch.distributed.tensor.experimental``); it replaces
``scaled_dot_product_attention`` in a block, and takes causal attention without a mask alone. The kernel is chosen here,
because the ring knows two of those that ``scaled_dot_product_attention`` may choose, and cuDNN's is often its first.

Transformers builds no mask for an implementation under whose name no mask function is registered: the positions of a
process's tokens have a gap, which would be taken for the border of two packed documents.

Axes: B rows, T tokens of a row in this process, H query heads, K key heads, D head size.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv

from lowmem_ft.foundation.devices import compute_capability, kernels_of
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.upstream.layer_configs import layer_configs
from lowmem_ft.techniques.attention.grouped_attention import causal_attention, target_dtype

RING_ATTENTION = "ring_attn"
"""The ``attn_implementation`` under which transformers knows this attention."""

_AMPERE = (8, 0)
_LARGEST_FLASH_HEAD = 256
_HEAD_MULTIPLE = 8
"""The kernels take heads of a multiple of this size: torch pads others, for which DTensor has no rule."""

_EFFICIENT_BLOCK = 32
"""The memory-efficient kernel keeps its logarithms of sums in blocks of so many tokens, and the ring merges them with
outputs of as many tokens as there are: a part of a row must consist of whole blocks."""


class _Ring:
    """State of this process: without a running ring, attention is that of whole rows."""

    is_running = False


_ring = _Ring()


@functools.cache
def register_ring_attention() -> None:
    """Register the implementation with transformers, once per process."""
    AttentionInterface.register(RING_ATTENTION, _ring_attention_forward)


@contextlib.contextmanager
def ring_running() -> Iterator[None]:
    """Let the implementation compute parts of rows in a block in which torch's ring is in place."""
    _ring.is_running = True
    try:
        yield
    finally:
        _ring.is_running = False


def ring_has_kernels(device: torch.device) -> bool:
    """Return whether a device has the kernels that torch's ring handles: a GPU, or a CPU with stand-ins for them."""
    kernels = kernels_of(device)
    name = "aten::_scaled_dot_product_efficient_attention"
    return kernels == "cuda" or torch._C._dispatch_has_kernel_for_dispatch_key(name, kernels.upper())


def block_tokens(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Return the number of tokens of which a part of a row must be a multiple, by the kernel that will run.

    Args:
        config: the model's.
        dtype: the type of queries and keys.
        device: where they will be.
    """
    sizes = [_head_size(layer) for layer in layer_configs(config.get_text_config())]
    return 1 if all(_takes_flash(dtype, size, device) for size in sizes) else _EFFICIENT_BLOCK


def _head_size(config: Any) -> int:
    heads = getattr(config, "num_attention_heads", None) or 1
    return getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads


def _takes_flash(dtype: torch.dtype, head_size: int, device: torch.device) -> bool:
    """Return whether the ring runs the flash kernel, which takes grouped heads; else the memory-efficient one.

    Args:
        dtype: the type of queries and keys.
        head_size: elements of a head.
        device: where they are; on the CPU there is neither, and stand-ins take the part of an Ampere GPU's.
    """
    capability = compute_capability(device) if kernels_of(device) == "cuda" else _AMPERE
    is_half = dtype in (torch.bfloat16, torch.float16)
    return is_half and head_size <= _LARGEST_FLASH_HEAD and capability >= _AMPERE


def _ring_attention_forward(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention; transformers calls this in each layer.

    Args:
        module: the attention layer.
        query_BHTD: queries of this process's tokens.
        key_BKTD: keys of the same; K divides H.
        value_BKTD: values, whose D may be another.
        attention_mask: always None; models that build their own mask are rejected.
        dropout: on scores; 0 in a ring.
        scaling: factor on the scores; None: one over the square root of D.
        sliding_window: how many keys a query sees; None, in a ring.
        is_causal: whether attention is causal; None: the module's own value.
        kwargs: arguments of other implementations.

    Returns:
        The output, B x T x H x D, and None for the scores.

    Raises:
        UserError: if the call needs what a ring does not have.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    given = {
        "attention to later tokens": not causal,
        "a mask of the model's own": attention_mask is not None,
        "a cache of keys": query_BHTD.size(2) != key_BKTD.size(2),
        "sliding windows": sliding_window is not None,
        "dropout of scores": bool(dropout),
        **{name: kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias")},
    }
    if refused := [what for what, is_given in given.items() if is_given]:
        raise UserError(
            f"distributed.context needs plain causal attention, and that of {type(module).__name__} has "
            f"{', '.join(refused)}. Set distributed.context=1."
        )
    if not _ring.is_running:
        return causal_attention(
            module, query_BHTD, key_BKTD, value_BKTD, dropout=dropout, scaling=scaling
        ), None
    size, value_size = query_BHTD.size(-1), value_BKTD.size(-1)
    width = -(-max(size, value_size) // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
    dtype = target_dtype(query_BHTD, module)
    query, key, value = (_padded(part.to(dtype), width) for part in (query_BHTD, key_BKTD, value_BKTD))
    group = query.size(1) // key.size(1)
    flash = _takes_flash(dtype, width, query.device)
    if not flash:
        key, value = repeat_kv(key, group), repeat_kv(value, group)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION if flash else SDPBackend.EFFICIENT_ATTENTION):
        output_BHTD = F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=size**-0.5 if scaling is None else scaling,
            enable_gqa=flash and group > 1,
        )
    output_BTHD = output_BHTD.transpose(1, 2)
    return (output_BTHD if value_size == width else output_BTHD[..., :value_size]).contiguous(), None


def _padded(part: Tensor, width: int) -> Tensor:
    missing = width - part.size(-1)
    return F.pad(part, (0, missing)) if missing else part
