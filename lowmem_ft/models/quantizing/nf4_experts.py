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


class Nf4Packing:
    """A 4-bit parameter that experts are written into.

    Args:
        shape: shape of all weights, (E, O, I) or (E, I, O).
        like: weights of some experts, for their type and device.
    """

    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
        num_experts, num_scales = shape[0], math.prod(shape[1:]) // BLOCK
        self.shape, self.dtype, self.num_scales = torch.Size(shape), like.dtype, num_scales
        self._packed = like.new_empty(num_experts, math.prod(shape[1:]) // 2, dtype=torch.uint8)
        num_nested = -(-num_scales // _NESTED_BLOCK)
        self._scales = like.new_empty(num_experts, num_nested * _NESTED_BLOCK, dtype=torch.uint8)
        self._nested = like.new_empty(num_experts, num_nested, dtype=torch.float32)
        self._offsets = like.new_empty(num_experts, 1, dtype=torch.float32)
        self._states: tuple[Any, Any] | None = None

    def write(self, experts: slice, values: Tensor) -> None:
        """Pack some experts' weights, shape (number of them, O, I) or (..., I, O)."""
        from bitsandbytes.functional import quantize_4bit, quantize_blockwise

        packed, state = quantize_4bit(values.contiguous(), blocksize=BLOCK, quant_type="nf4")
        self._packed[experts] = packed.view(len(values), -1)
        scales = state.absmax.view(len(values), -1)
        # One after the other: a sum over several experts at once may be rounded otherwise, by how many there are.
        offsets = torch.stack([of_one.mean() for of_one in scales]).unsqueeze(1)
        padding = (0, self._scales.shape[1] - self.num_scales)
        scales = nn.functional.pad(scales - offsets, padding)
        codes, nested = quantize_blockwise(scales.flatten(), blocksize=_NESTED_BLOCK)
        self._scales[experts] = codes.view(len(values), -1)
        self._nested[experts] = nested.absmax.view(len(values), -1)
        self._offsets[experts] = offsets
        self._states = state, nested

    def parameter(self) -> Any:
        """Return bitsandbytes' ``Params4bit`` of E * O * I / 2 bytes, once all experts are written.

        Its state has the shape and type of the weights, and an offset for each expert; each expert's scales begin a
        block of their own.
        """
        from bitsandbytes import nn as bitsandbytes_nn
        from bitsandbytes.functional import QuantState

        assert self._states is not None
        state, nested = self._states
        nested.absmax = self._nested.flatten()
        whole = QuantState(
            absmax=self._scales.flatten(),
            shape=self.shape,
            dtype=self.dtype,
            blocksize=BLOCK,
            code=state.code,
            quant_type="nf4",
            offset=self._offsets,
            state2=nested,
        )
        parameter_class: Any = bitsandbytes_nn.Params4bit
        return parameter_class(
            self._packed.view(-1, 1),
            requires_grad=False,
            quant_state=whole,
            quant_type="nf4",
            blocksize=BLOCK,
            bnb_quantized=True,
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
    """The weight that :class:`Nf4Packing` has made of a module's tensor.

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
