"""``scaled_dot_product_attention`` on the virtual device: the kernel that CUDA would take, with its shapes.

Source: pytorch, aten/src/ATen/native/transformers/attention.cpp.
Dimensions: B batch, H heads, T query tokens, S key tokens, D head size.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_ft.foundation.upstream.attention_choice import (
    KERNEL_NAMES,
    Backend,
    SdpaCall,
    choose_sdpa,
    trains,
)
from lowmem_ft.virtual_gpu.calls.active import active_gpu


@functools.cache
def register_attention() -> None:
    """Give ``scaled_dot_product_attention`` on the virtual device CUDA's choice of kernels; once per process."""
    _LIBRARY.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    gpu = active_gpu()
    call = SdpaCall(*args, **kwargs, capability=gpu.spec.compute_capability)
    choice = choose_sdpa(call)
    why = f" ({choice.reason})" if choice.reason else ""
    gpu.say(f"attention: {KERNEL_NAMES[choice.backend]}{why}")
    return _attend(choice.backend, call)


def _attend(backend: Backend, call: SdpaCall) -> Tensor:
    """Compute attention, B x H x T x D, with a given kernel, and with the temporaries that torch makes around it.

    The unfused kernel adds its mask out of place here, in place on a device; its peak comes later and is the same.
    """
    aten, scale, size = torch.ops.aten, call.scale, call.head_size
    if backend == "flash":
        scale = size**-0.5 if scale is None else scale  # that of the size before padding
        padded = (_padded_to_multiple(8, operand) for operand in call.operands)
        out_BHTD = aten._scaled_dot_product_flash_attention(
            *padded, call.dropout_p, call.is_causal, False, scale=scale
        )[0]
        return out_BHTD if out_BHTD.size(-1) == size else out_BHTD[..., :size]
    keeps_logsumexp = trains(*call.operands)
    bias = _additive(call.attn_mask, call.query.dtype, -65504.0 if backend == "cudnn" else float("-inf"))
    if backend == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(
            *call.operands, bias, keeps_logsumexp, call.dropout_p, call.is_causal, False, scale=scale
        )[0]
    if backend == "efficient":
        shape = (*call.query.shape[:-1], call.key.size(-2))
        bias = None if bias is None else _aligned_bias(bias).expand(shape)
        return aten._scaled_dot_product_efficient_attention(
            *call.operands, bias, keeps_logsumexp, call.dropout_p, call.is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        *call.operands, bias, call.dropout_p, call.is_causal, None, scale=scale, enable_gqa=call.enable_gqa
    )[0]


_LIBRARY = torch.library.Library("aten", "IMPL")


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
