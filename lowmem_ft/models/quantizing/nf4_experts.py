"""Fused experts in 4 bits, in bitsandbytes' own storage: NF4, with scales that are quantised, too."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 64
"""Weights that share a scale; an expert has a multiple of it, so that no block belongs to two."""

_NESTED_BLOCK = 256
"""Scales that share a scale of their own."""


@torch.no_grad()
def pack(values: Tensor) -> Any:
    """Return a 4-bit parameter of experts.

    Args:
        values: shape (E, O, I) or (E, I, O), in a floating type.

    Returns:
        bitsandbytes' ``Params4bit`` of E * O * I / 2 bytes. Its state has the shape and type of ``values``, and an
        offset for each expert; each expert's scales begin a block of their own.
    """
    from bitsandbytes import nn as bitsandbytes_nn
    from bitsandbytes.functional import QuantState, quantize_4bit, quantize_blockwise

    num_experts = len(values)
    packed, state = quantize_4bit(values.contiguous(), blocksize=BLOCK, quant_type="nf4")
    scales = state.absmax.view(num_experts, -1)
    offset = scales.mean(1, keepdim=True)
    missing = -scales.shape[1] % _NESTED_BLOCK
    scales = nn.functional.pad(scales - offset, (0, missing))
    state.absmax, nested = quantize_blockwise(scales.flatten(), blocksize=_NESTED_BLOCK)
    whole = QuantState(
        absmax=state.absmax,
        shape=values.shape,
        dtype=values.dtype,
        blocksize=BLOCK,
        code=state.code,
        quant_type="nf4",
        offset=offset,
        state2=nested,
    )
    parameter_class: Any = bitsandbytes_nn.Params4bit
    return parameter_class(
        packed, requires_grad=False, quant_state=whole, quant_type="nf4", blocksize=BLOCK, bnb_quantized=True
    )


def unpack(packed: Tensor, state: Any, experts: slice, dtype: torch.dtype) -> Tensor:
    """Return some experts' weights, shape (number of them, O, I) or (..., I, O).

    Args:
        packed: the parameter's bytes, however they are shaped.
        state: its state.
        experts: the first and the end of them.
        dtype: type of the result.
    """
    ops = torch.ops.bitsandbytes
    num_experts, *shape = state.shape
    num = experts.stop - experts.start
    nested = state.state2
    scales = ops.dequantize_blockwise(
        state.absmax.view(num_experts, -1)[experts].flatten(),
        nested.absmax.view(num_experts, -1)[experts].flatten(),
        nested.code,
        _NESTED_BLOCK,
        torch.float32,
    ).view(num, -1)
    scales = (scales + state.offset[experts])[:, : math.prod(shape) // BLOCK]
    return ops.dequantize_4bit(
        packed.view(num_experts, -1)[experts].reshape(-1, 1),
        scales.flatten(),
        BLOCK,
        "nf4",
        [num, math.prod(shape)],  # rows of whole blocks: the kernel for CPUs begins one with each row
        dtype,
    ).view(num, *shape)


class Nf4Weight:
    """The weight that :func:`pack` has made of a module's tensor.

    Args:
        module: an experts module.
        name: name of the parameter, which is looked up at each use: FSDP2 makes parameters that lack the state.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        weight: Any = module._parameters[name]
        self.state = weight.quant_state

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that was packed."""
        return tuple(self.state.shape)

    def unpack(self, experts: slice, dtype: torch.dtype) -> Tensor:
        """Return some experts' weights in a type."""
        return unpack(self.module.get_parameter(self.name).data, self.state, experts, dtype)
