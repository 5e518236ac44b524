"""Short causal convolutions over the tokens of each channel, as the kernels of causal-conv1d compute them.

B: rows, D: channels, T: tokens, W: weights of a channel. Source: causal-conv1d 1.7.0, ``causal_conv1d_interface.py``,
``cpp_functions.py``, ``csrc/causal_conv1d.cpp``.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.virtual_gpu.recurrent.package_kernels import compiled_kernel, refusal

_FEWEST_WEIGHTS, _MOST_WEIGHTS = 2, 4
CHANNELS_TOGETHER = 8
"""Channels that a kernel reads at once where they are next to each other."""


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """Compute ``causal_conv1d.causal_conv1d_fn`` on fake tensors.

    Args:
        x: B x D x T.
        weight: D x W.
        bias: D.
        seq_idx: number of the document of each token, B x T.
        initial_states: inputs before the first token, B x D x (W - 1).
        return_final_states: whether to return the last inputs, too.
        final_states_out: memory for them.
        activation: ``silu``, ``swish`` or none.

    Returns:
        The outputs, B x D x T, with the last inputs if they are asked for.

    Raises:
        UserError: for what the package refuses.
    """
    if activation not in (None, "silu", "swish"):
        raise refusal("causal-conv1d", "the activation silu, swish or none", str(activation))
    return _CausalConvolution.apply(
        x, weight, bias, seq_idx, initial_states, return_final_states, final_states_out
    )


class _CausalConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        x, weight, bias, seq_idx, initial_states, return_final_states, final_states = given
        if 1 not in x.stride()[1:]:
            x = x.contiguous()
        bias = None if bias is None else bias.contiguous()
        seq_idx = None if seq_idx is None else seq_idx.contiguous()
        if initial_states is not None and 1 not in initial_states.stride()[1:]:
            initial_states = initial_states.contiguous()
        if not return_final_states:
            final_states = None
        elif final_states is None:
            B, D, W = *x.shape[:2], weight.shape[1]
            final_states = x.new_empty(B, W - 1, D).transpose(1, 2)
        outputs = convolved(x, weight, bias, seq_idx, initial_states, final_states)
        ctx.save_for_backward(x, weight, bias, seq_idx, initial_states)
        return (outputs, final_states) if return_final_states else outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, bias, seq_idx, initial_states = ctx.saved_tensors
        d_outputs, *d_final = gradients
        if 1 not in d_outputs.stride()[1:]:
            d_outputs = d_outputs.contiguous()
        d_x, d_weight, d_bias, d_states = convolution_gradients(
            x, weight, bias, d_outputs, seq_idx, initial_states, d_final[0] if d_final else None
        )
        return d_x, d_weight, d_bias, None, d_states, None, None


def convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None = None,
    final_states: Tensor | None = None,
) -> Tensor:
    """Return the outputs of the kernel.

    Raises:
        UserError: for what it refuses.
    """
    _check(x, weight, seq_idx is not None or initial_states is not None or final_states is not None)
    outputs = torch.empty_like(x)
    compiled_kernel(
        "causal_conv1d_fwd",
        (x, weight, bias, seq_idx, initial_states),
        (outputs, final_states),
        flops=2 * weight.shape[1] * x.numel(),
    )
    return outputs


def convolution_gradients(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    d_outputs: Tensor,
    seq_idx: Tensor | None,
    initial_states: Tensor | None = None,
    d_final_states: Tensor | None = None,
    d_x: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight, bias and first inputs; the input's is written into ``d_x`` if given."""
    d_x = torch.empty_like(x) if d_x is None else d_x
    d_weight = torch.zeros_like(weight, dtype=torch.float32)
    d_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    d_states = None
    if initial_states is not None and initial_states.requires_grad:
        B, D, W = *x.shape[:2], weight.shape[1]
        d_states = x.new_empty(B, W - 1, D).transpose(1, 2)
    if _is_channel_last(x) and d_outputs.stride(1) != 1:
        d_outputs = d_outputs.transpose(1, 2).contiguous().transpose(1, 2)
    elif not _is_channel_last(x):
        d_outputs = d_outputs if d_outputs.stride(2) == 1 else d_outputs.contiguous()
    sums = _partial_sums(x, d_weight, d_bias)
    compiled_kernel(
        "causal_conv1d_bwd",
        (x, weight, bias, d_outputs, seq_idx, initial_states, d_final_states),
        (d_x, d_states),
        updates=sums or [d_weight, *([] if d_bias is None else [d_bias])],
        flops=6 * weight.shape[1] * x.numel(),  # the outputs again, for the activation, and both gradients
    )
    for gradient, parts in zip((d_weight, d_bias), sums, strict=False):
        assert gradient is not None
        gradient.add_(parts.sum(tuple(range(parts.dim() - gradient.dim()))))
    d_weight = d_weight.type_as(weight)
    d_bias = None if d_bias is None or bias is None else d_bias.type_as(bias)
    return d_x, d_weight, d_bias, d_states


def _partial_sums(x: Tensor, d_weight: Tensor, d_bias: Tensor | None) -> list[Tensor]:
    """Return buffers for sums in a fixed order, if the program has asked for such."""
    asked = os.environ.get("CAUSAL_CONV1D_DETERMINISTIC", "")[:1]
    if asked == "0" or (asked != "1" and not torch.are_deterministic_algorithms_enabled()):
        return []
    parts = [x.shape[0]]
    if _is_channel_last(x):
        parts.append(-(-x.shape[2] // (64 if x.shape[2] <= 128 else 128)))
    return [one.new_zeros(*parts, *one.shape) for one in (d_weight, d_bias) if one is not None]


def _is_channel_last(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(2) > 1


def _check(x: Tensor, weight: Tensor, needs_channel_last: bool) -> None:
    width, channels = weight.shape[1], x.shape[1]
    if not _FEWEST_WEIGHTS <= width <= _MOST_WEIGHTS:
        needs, got = f"{_FEWEST_WEIGHTS} to {_MOST_WEIGHTS} weights a channel", str(width)
    elif _is_channel_last(x) and channels % CHANNELS_TOGETHER:
        needs, got = f"a multiple of {CHANNELS_TOGETHER} channels", str(channels)
    elif _is_channel_last(x) and any(x.stride(dim) % CHANNELS_TOGETHER for dim in (0, 2)):
        needs = f"strides that are multiples of {CHANNELS_TOGETHER}"
        got = str(tuple(x.stride()))
    elif needs_channel_last and not _is_channel_last(x):
        needs, got = "channels next to each other for documents and states", f"strides {tuple(x.stride())}"
    else:
        return
    raise refusal("causal-conv1d", needs, got)
