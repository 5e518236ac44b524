"""Fused experts in 4 or 8 bits: bitsandbytes packs linear layers alone, and most of a mixture's weights are no such.

transformers keeps the experts of a layer in tensors of three axes. Each becomes one packed parameter, which holds for
every expert what a ``Linear4bit`` or ``Linear8bitLt`` of its own would hold. A product unpacks some experts at a time,
keeps nothing for backward except where each expert's rows end, and unpacks them again there.

Axes: S rows of all experts together, E experts, I inputs, O outputs of a product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from lowmem_ft.models.quantizing import int8_experts, nf4_experts
from lowmem_ft.tensors.logical_size import is_packed, logical_shape
from lowmem_ft.upstream.grouped_experts import GroupedExperts, weights_of

Format = Literal["nf4", "int8"]

_UNPACKED_BYTES = 2**28
"""Most bytes of experts that are unpacked at once, unless a single one has more."""


def fused_experts(model: nn.Module, kind: Format) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose experts are tensors of three axes that can be packed, by their names."""
    for name, module in model.named_modules():
        weights = [module._parameters.get(weight) for weight in weights_of(module)]
        if weights and all(weight is not None and _can_be_packed(weight, kind) for weight in weights):
            yield name, module


def _can_be_packed(weight: nn.Parameter, kind: Format) -> bool:
    fills_blocks = kind == "int8" or math.prod(weight.shape[1:]) % nf4_experts.BLOCK == 0
    return weight.dim() == 3 and weight.is_floating_point() and fills_blocks


def pack(module: Any, values: Tensor, kind: Format) -> nn.Parameter:
    """Return a packed parameter for a weight of an experts module, shape (E, O, I) or (E, I, O)."""
    if kind == "nf4":
        return nf4_experts.pack(values)
    return int8_experts.pack(values, is_transposed=module.is_transposed)


class PackedExperts(GroupedExperts):
    """The forward pass of a module whose experts have been packed, in the place of its own.

    Args:
        module: an experts module of transformers, whose weights are packed.
        dtype: type of its products.
    """

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        super().__init__(module)
        self._dtype = dtype
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._unpackers: dict[str, Callable[[slice, torch.dtype], Tensor]] = {}
        for name in weights_of(module):
            weight = module._parameters[name]
            self._shapes[name] = logical_shape(weight)
            in_4_bits = hasattr(weight, "quant_state")
            self._unpackers[name] = (nf4_experts if in_4_bits else int8_experts).unpacker(module, name)

    @classmethod
    def install(cls, module: nn.Module, dtype: torch.dtype, kind: Format) -> None:
        """Pack the tensors of a module that are not packed yet, and replace its forward."""
        for name in weights_of(module):
            weight = module._parameters[name]
            assert weight is not None
            if not is_packed(weight):
                module._parameters[name] = pack(module, weight.data, kind)
        module.forward = cls(module, dtype)  # type: ignore[method-assign]

    def compute_dtype(self, name: str) -> torch.dtype:
        """Return the type that a weight is unpacked to."""
        return self._dtype

    def multiply(self, rows: Tensor, ends_E: Tensor, name: str, *, swapped: bool) -> Tensor:
        """Multiply each expert's rows by its weight, or by the weight with its axes swapped; shape (S, O) or (S, I)."""
        num_experts, *shape = self._shapes[name]
        size_of_one = math.prod(shape) * self._dtype.itemsize
        at_once = min(num_experts, max(1, _UNPACKED_BYTES // size_of_one))
        rows = rows.to(self._dtype)
        if at_once == num_experts:
            return self._part(rows, ends_E, name, slice(0, num_experts), swapped)
        result = rows.new_empty(len(rows), shape[0] if swapped else shape[1])
        numbers_S = torch.arange(len(rows), device=rows.device)
        for first in range(0, num_experts, at_once):
            some = slice(first, min(first + at_once, num_experts))
            begin = ends_E[first - 1] if first else torch.zeros_like(ends_E[0])
            ends = ends_E[some] - begin
            # Their rows first: where they begin is known to the device alone.
            order_S = (numbers_S + begin) % len(rows)
            part = self._part(rows[order_S], ends, name, some, swapped)
            result[order_S] = torch.where((numbers_S < ends[-1]).unsqueeze(1), part, result[order_S])
        return result

    def _part(self, rows: Tensor, ends: Tensor, name: str, experts: slice, swapped: bool) -> Tensor:
        weight = self._unpackers[name](experts, self._dtype)
        return moe._grouped_mm(rows, weight.transpose(1, 2) if swapped else weight, ends)
