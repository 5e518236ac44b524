"""Fused experts in 4 bits: bitsandbytes packs linear layers alone, and most of a mixture's weights are no such layers.

transformers keeps the experts of a layer in tensors of three axes. Each becomes one 4-bit parameter, which holds for
every expert the same bytes as a ``Linear4bit`` of its own: NF4, with scales that are quantised too. A product unpacks
some experts at a time, keeps nothing for backward except where each expert's rows end, and unpacks them again there.
Rows are sorted by expert, and the host never waits to learn how many each has.

Axes: T tokens, K experts that a token passes, S = T * K rows, E experts, I inputs, O outputs of a product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from lowmem_ft.upstream.grouped_experts import GroupedExperts, weights_of

BLOCK = 64
"""Weights that share a scale; an expert has a multiple of it, so that no block belongs to two."""

_NESTED_BLOCK = 256
"""Scales that share a scale of their own."""

_UNPACKED_BYTES = 2**28
"""Most bytes of experts that are unpacked at once, unless a single one has more."""


def fused_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose experts are tensors of three axes that can be packed, by their names."""
    for name, module in model.named_modules():
        weights = [module._parameters.get(weight) for weight in weights_of(module)]
        if weights and all(weight is not None and _can_be_packed(weight) for weight in weights):
            yield name, module


def _can_be_packed(weight: nn.Parameter) -> bool:
    return weight.dim() == 3 and weight.is_floating_point() and math.prod(weight.shape[1:]) % BLOCK == 0


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


class PackedExperts(GroupedExperts):
    """The forward pass of a module whose experts have been packed, in the place of its own.

    Args:
        module: an experts module of transformers.
        dtype: type of its products.
    """

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        super().__init__(module)
        self._dtype = dtype
        # By name, as FSDP2 makes parameters that lack the state.
        self._states = {name: module._parameters[name].quant_state for name in weights_of(module)}

    @classmethod
    def install(cls, module: nn.Module, dtype: torch.dtype) -> None:
        """Pack the tensors of a module that are not packed yet, and replace its forward."""
        for name in weights_of(module):
            weight = module._parameters[name]
            assert weight is not None
            if not hasattr(weight, "quant_state"):
                module._parameters[name] = pack(weight.data)
        module.forward = cls(module, dtype)  # type: ignore[method-assign]

    def compute_dtype(self, name: str) -> torch.dtype:
        """Return the type that a weight is unpacked to."""
        return self._dtype

    def multiply(self, rows: Tensor, ends_E: Tensor, name: str, *, swapped: bool) -> Tensor:
        """Multiply each expert's rows by its weight, or by the weight with its axes swapped; shape (S, O) or (S, I)."""
        packed, state = self.module._parameters[name], self._states[name]
        num_experts, *shape = state.shape
        size_of_one = math.prod(shape) * self._dtype.itemsize
        at_once = min(num_experts, max(1, _UNPACKED_BYTES // size_of_one))
        rows = rows.to(self._dtype)
        if at_once == num_experts:
            return self._part(rows, ends_E, packed, state, slice(0, num_experts), swapped)
        result = rows.new_empty(len(rows), shape[0] if swapped else shape[1])
        numbers_S = torch.arange(len(rows), device=rows.device)
        for first in range(0, num_experts, at_once):
            some = slice(first, min(first + at_once, num_experts))
            begin = ends_E[first - 1] if first else torch.zeros_like(ends_E[0])
            ends = ends_E[some] - begin
            # Their rows first: where they begin is known to the device alone.
            order_S = (numbers_S + begin) % len(rows)
            part = self._part(rows[order_S], ends, packed, state, some, swapped)
            result[order_S] = torch.where((numbers_S < ends[-1]).unsqueeze(1), part, result[order_S])
        return result

    def _part(
        self, rows: Tensor, ends: Tensor, packed: Any, state: Any, experts: slice, swapped: bool
    ) -> Tensor:
        weight = unpack(packed.data, state, experts, self._dtype)
        return moe._grouped_mm(rows, weight.transpose(1, 2) if swapped else weight, ends)
