"""Costs of an operator that do not depend on the hardware: its FLOPs, and whether it launches anything."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

Formula = Callable[[tuple[Any, ...], dict[str, Any], Any], int]
"""Function from the positional arguments, keyword arguments and result of one call to its FLOPs."""


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the floating-point operations of the products in one call of an operator; 0 if it computes none.

    A multiply and an add are two. Causal attention counts only the half that its kernels compute.

    Args:
        func: operator overload, as a dispatch mode sees it.
        args: its positional arguments.
        kwargs: its keyword arguments.
        result: what it returned.

    Returns:
        The number of operations.
    """
    formula = _formula_of(func)
    return 0 if formula is None else formula(args, kwargs, result)


@functools.cache
def is_free(func: Any) -> bool:
    """Return whether an operator launches no kernel: views, uninitialised allocations, queries of a tensor."""
    if func.is_view or func._schema.name.removeprefix("aten::") in _FREE.split():
        return True
    returns_tensor = any("Tensor" in str(returned.type) for returned in func._schema.returns)
    return not returns_tensor and not func._schema.is_mutable and func._schema.name != _SUMS_UNSAID


_SUMS_UNSAID = "c10d::allreduce_coalesced_"
"""A collective that writes its arguments, which its schema does not say."""

_FREE = (
    "_unsafe_view empty empty_like empty_permuted empty_strided lift_fresh new_empty new_empty_strided record_stream "
    "resize_ set_"
)


def _formula_of(func: Any) -> Formula | None:
    """Return our formula, looked up once per operator, or else torch's, which knows the rarer ones (convolutions)."""
    ours = _our_formula(func)
    if ours is not None:
        return ours
    # Not cached: a program may register one at any time.
    counted = flop_registry.get(func.overloadpacket)
    if counted is None:
        return None
    return lambda args, kwargs, result: counted(*args, **kwargs, out_val=result)


@functools.cache
def _our_formula(func: Any) -> Formula | None:
    name = func._schema.name
    if name in PRODUCTS:
        return PRODUCTS[name]
    if name in _RECURRENT:
        return _RECURRENT[name]
    if name in ATTENTION:
        return functools.partial(_attention, name, [argument.name for argument in func._schema.arguments])
    return None


def _product(position: int) -> Formula:
    """Return the formula of result times the inner dimension, the last one of the argument at ``position``."""

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        return 2 * result.numel() * args[position].shape[-1]

    return formula


def _grouped_product(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Count grouped products: two matrices with offsets give one a group, inner dimensions sum to the shared one."""
    left, right = args[:2]
    if left.dim() == 2 and right.dim() == 2:
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return 2 * result.numel() * left.shape[-1]


def _recurrent_layers(products: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Count every row with every matrix, once forward and twice backward."""
    rows, weights = args[:2]
    num_rows = math.prod(rows.shape[:-1])
    return 2 * products * num_rows * sum(weight.numel() for weight in weights if weight.dim() == 2)


_BY_FIRST = (
    "aten::mm aten::bmm aten::mv aten::_int_mm aten::_scaled_mm bitsandbytes::int8_linear_matmul "
    "bitsandbytes::int8_scaled_mm bitsandbytes::int8_mixed_scaled_mm bitsandbytes::gemv_4bit"
)
_BY_SECOND = "aten::addmm aten::addmm_ aten::_addmm_activation aten::addmv aten::baddbmm aten::baddbmm_"
PRODUCTS: dict[str, Formula] = {
    **dict.fromkeys(_BY_FIRST.split(), _product(0)),
    **dict.fromkeys(_BY_SECOND.split(), _product(1)),
    "aten::dot": lambda args, kwargs, result: 2 * args[0].numel(),
    "aten::addbmm": lambda args, kwargs, result: 2 * args[1].numel() * args[2].shape[-1],
    **dict.fromkeys(("aten::_grouped_mm", "aten::_scaled_grouped_mm"), _grouped_product),
}

_RECURRENT: dict[str, Formula] = {
    "aten::_cudnn_rnn": functools.partial(_recurrent_layers, 1),
    "aten::_cudnn_rnn_backward": functools.partial(_recurrent_layers, 2),
}

# Products of queries, keys and values: 2 forward; 5 backward, which recomputes the scores. The second number is the
# dimension of the query that counts tokens.
ATTENTION: dict[str, tuple[int, int]] = {
    "aten::_scaled_dot_product_flash_attention": (2, -2),
    "aten::_scaled_dot_product_efficient_attention": (2, -2),
    "aten::_scaled_dot_product_cudnn_attention": (2, -2),
    "aten::_flash_attention_forward": (2, -3),
    "aten::_efficient_attention_forward": (2, -3),
    "aten::_scaled_dot_product_flash_attention_backward": (5, -2),
    "aten::_scaled_dot_product_efficient_attention_backward": (5, -2),
    "aten::_scaled_dot_product_cudnn_attention_backward": (5, -2),
    "aten::_flash_attention_backward": (5, -3),
    "aten::_efficient_attention_backward": (5, -3),
    "torch_attn::_varlen_attn": (2, -3),
    "torch_attn::_varlen_attn_backward": (5, -3),
}


def _attention(
    name: str, parameters: list[str], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> int:
    """Count every query with every key of its sequence; in packed ones, whose lengths are values, with the longest."""
    products, token_dim = ATTENTION[name]
    call = {**dict(zip(parameters, args, strict=False)), **kwargs}
    query = call["query"]
    _, keys = lengths_of_attention(call, token_dim)
    left, right = call.get("window_size") or (-1, -1)
    if right == 0 and 0 <= left < keys - 1:  # causal, and no further back than the window
        return 2 * products * query.numel() * (left + 1)
    flops = 2 * products * query.numel() * keys
    # custom_mask_type 1 and 2 are causal (CUTLASS' CausalFromTopLeft and CausalFromBottomRight).
    is_causal = call.get("is_causal", False) or call.get("custom_mask_type", 0) > 0
    return flops // 2 if is_causal else flops


def lengths_of_attention(call: dict[str, Any], token_dim: int) -> tuple[int, int]:
    """Return the queries and the keys of a sequence; of packed ones, whose lengths are values, of the longest.

    Args:
        call: arguments of the operator by name.
        token_dim: dimension of the query that counts tokens.
    """
    if not any(_is_given(call, offsets) for offsets in ("cum_seq_q", "cu_seqlens_q", "cu_seq_q")):
        return call["query"].shape[token_dim], call["key"].shape[token_dim]
    of_queries, of_keys = ("max_q", "max_k") if "max_k" in call else ("max_seqlen_q", "max_seqlen_k")
    return call[of_queries], call[of_keys]


def _is_given(call: dict[str, Any], argument: str) -> bool:
    """Return whether an argument is a tensor with elements; in a backward pass, absent offsets are empty tensors."""
    value = call.get(argument)
    return isinstance(value, torch.Tensor) and value.numel() > 0
