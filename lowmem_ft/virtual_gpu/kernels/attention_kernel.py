"""``scaled_dot_product_attention`` on the virtual device: the kernel that CUDA would take, with its shapes.

Source: pytorch, aten/src/ATen/native/transformers/attention.cpp.
Dimensions: B batch, H heads, T query tokens, S key tokens, D head size.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_ft.virtual_gpu.active import active_gpu
from lowmem_ft.virtual_gpu.kernels.attention_choice import KERNEL_NAMES, SdpaChoice, choose_sdpa, trains


@functools.cache
def register_attention() -> None:
    """Give ``scaled_dot_product_attention`` on the virtual device CUDA's choice of kernels; once per process."""
    _LIBRARY.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")


def attend(
    choice: SdpaChoice,
    query_BHTD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention with a given kernel, and with the temporaries that torch makes around it.

    The unfused kernel adds its mask out of place here, in place on a device; its peak comes later and is the same.

    Args:
        choice: from :func:`choose_sdpa`.
        query_BHTD: queries.
        key_BHSD: keys.
        value_BHSD: values.
        attn_mask: boolean or additive.
        dropout_p: share of attention weights dropped.
        is_causal: whether the kernel masks the future itself.
        scale: factor of the scores; None is one over the square root of D.
        enable_gqa: whether groups of query heads share a key head.

    Returns:
        The output, of shape B x H x T x D.
    """
    aten = torch.ops.aten
    operands = (query_BHTD, key_BHSD, value_BHSD)
    if choice.backend == "flash":
        size = query_BHTD.size(-1)
        scale = size**-0.5 if scale is None else scale  # that of the size before padding
        padded = (_padded_to_multiple(8, operand) for operand in operands)
        out_BHTD = aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, False, scale=scale
        )[0]
        return out_BHTD if out_BHTD.size(-1) == size else out_BHTD[..., :size]
    keeps_logsumexp = trains(*operands)
    if choice.backend == "cudnn":
        bias = _additive(attn_mask, query_BHTD.dtype, -65504.0)
        return aten._scaled_dot_product_cudnn_attention(
            *operands, bias, keeps_logsumexp, dropout_p, is_causal, False, scale=scale
        )[0]
    bias = _additive(attn_mask, query_BHTD.dtype, float("-inf"))
    if choice.backend == "efficient":
        shape = (*query_BHTD.shape[:-1], key_BHSD.size(-2))
        bias = None if bias is None else _aligned_bias(bias).expand(shape)
        return aten._scaled_dot_product_efficient_attention(
            *operands, bias, keeps_logsumexp, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        *operands, bias, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


_LIBRARY = torch.library.Library("aten", "IMPL")


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    gpu = active_gpu()
    choice = choose_sdpa(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        enable_gqa=enable_gqa,
        compute_capability=gpu.spec.compute_capability,
    )
    why = f" ({choice.reason})" if choice.reason else ""
    gpu.say(f"attention: {KERNEL_NAMES[choice.backend]}{why}")
    return attend(
        choice, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


# --- torch's preparation of a kernel's inputs -------------------------------------------------------------------------


def _padded_to_multiple(alignment: int, operand: Tensor) -> Tensor:
    missing = -operand.size(-1) % alignment
    return F.pad(operand, (0, missing)) if missing else operand


def _additive(attn_mask: Tensor | None, dtype: torch.dtype, masked: float) -> Tensor | None:
    """Return a boolean mask as numbers that are added to the scores."""
    if attn_mask is None or attn_mask.dtype != torch.bool:
        return attn_mask
    zero = torch.scalar_tensor(0.0, dtype=dtype, device=attn_mask.device)
    return torch.where(attn_mask.logical_not(), masked, zero)


def _aligned_bias(bias: Tensor) -> Tensor:
    """Return a bias whose rows start at multiples of 8 elements, as the kernel loads them; padded if need be."""
    if bias.stride(-1) == 1 and all(stride % 8 == 0 for stride in bias.stride()[:-1]):
        return bias
    size = bias.size(-1)
    return F.pad(bias, (0, 8 - size % 8))[..., :size]
