"""Fused experts in 4 or 8 bits: their products, whatever the format.

transformers keeps the experts of a layer in tensors of three axes. A product unpacks some experts at a time, keeps
nothing for backward except where each expert's rows end, and unpacks them again there.

bitsandbytes packs only linear layers, but most weights of a mixture are experts in one tensor. In ``nf4_experts.py``
and ``int8_experts.py`` each tensor becomes one packed parameter, which holds for every expert what a ``Linear4bit`` or
``Linear8bitLt`` of its own would hold. Formats that checkpoints bring are in ``mxfp4.py`` and ``block_fp8.py``.

Axes: S rows of all experts together, E experts, I inputs, O outputs of a product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from lowmem_ft.foundation.tensors.autocast_dtype import autocast_dtype
from lowmem_ft.foundation.tensors.logical_size import is_packed
from lowmem_ft.foundation.upstream.grouped_experts import GroupedExperts, weights_of
from lowmem_ft.models.quantizing import int8_experts, nf4_experts

Format = Literal["nf4", "int8"]

_UNPACKED_BYTES = 2**28
"""Most bytes of experts that are unpacked at once, unless a single one has more."""

_PACKED_AT_ONCE = 2**25
"""Most bytes of experts in 16 bits that are read and packed at once, unless a single one has more."""


def fused_experts(model: nn.Module, kind: Format | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) for experts stored as three-axis tensors; with ``kind``, only those that it can pack."""
    for name, module in model.named_modules():
        weights = [module._parameters.get(weight) for weight in weights_of(module)]
        if weights and all(weight is not None and _can_be_packed(weight, kind) for weight in weights):
            yield name, module


def _can_be_packed(weight: nn.Parameter, kind: Format | None) -> bool:
    fills_blocks = kind != "nf4" or math.prod(weight.shape[1:]) % nf4_experts.BLOCK == 0
    return weight.dim() == 3 and weight.is_floating_point() and fills_blocks


@torch.no_grad()
def pack(module: Any, read: Callable[[slice], Tensor], shape: tuple[int, ...], kind: Format) -> nn.Parameter:
    """Return a packed parameter for a weight of an experts module.

    Args:
        module: the experts module.
        read: returns the weights of some experts; it is called for up to 32 MiB of them at a time, or for one.
        shape: shape of the weight, (E, O, I) or (E, I, O).
        kind: the format.
    """
    packing = None
    at_once = max(1, _PACKED_AT_ONCE // (2 * math.prod(shape[1:])))
    for first in range(0, shape[0], at_once):
        some = slice(first, min(first + at_once, shape[0]))
        values = read(some)
        if packing is None:
            packing = (
                nf4_experts.Nf4Packing(shape, values)
                if kind == "nf4"
                else int8_experts.Int8Packing(shape, values, is_transposed=module.is_transposed)
            )
        packing.write(some, values)
        del values  # before the next are read
    assert packing is not None, "a mixture has experts"
    return packing.parameter()


class ExpertWeight(Protocol):
    """The packed weight of a layer's experts for one of their products."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights that are packed: (E, O, I), or (E, I, O) where the module stores them so."""
        ...

    def unpack(self, experts: slice, dtype: torch.dtype) -> Tensor:
        """Return some experts' weights in a type; shape (number of them, O, I) or (..., I, O)."""
        ...


class PackedExperts(GroupedExperts):
    """The forward pass of a module whose experts are packed, in the place of its own.

    Args:
        module: an experts module of transformers.
        dtype: type of its products; None: autocast's, and without autocast that of the rows.
        weights: its packed weights, by the names of the tensors in whose place they are.
    """

    def __init__(self, module: Any, dtype: torch.dtype | None, weights: Mapping[str, ExpertWeight]) -> None:
        super().__init__(module)
        self._dtype, self._weights = dtype, weights

    @classmethod
    def install(cls, module: nn.Module, dtype: torch.dtype, kind: Format) -> None:
        """Pack the tensors of a module that are not packed yet, and replace its forward."""
        for name in weights_of(module):
            weight = module._parameters[name]
            assert weight is not None
            if not is_packed(weight):
                module._parameters[name] = pack(module, weight.data.__getitem__, weight.shape, kind)
        of_kind = nf4_experts.Nf4Weight if kind == "nf4" else int8_experts.Int8Weight
        weights = {name: of_kind(module, name) for name in weights_of(module)}
        module.forward = cls(module, dtype, weights)  # type: ignore[method-assign]

    def compute_dtype(self, name: str, rows: Tensor) -> torch.dtype:
        """Return the type that a weight is unpacked to."""
        return self._dtype or autocast_dtype(rows) or rows.dtype

    def multiply(
        self, rows: Tensor, ends_E: Tensor, name: str, dtype: torch.dtype, *, swapped: bool
    ) -> Tensor:
        """Multiply each expert's rows by its weight, or by the weight with its axes swapped; shape (S, O) or (S, I)."""
        weight = self._weights[name]
        num_experts, *shape = weight.shape
        at_once = min(num_experts, max(1, _UNPACKED_BYTES // (math.prod(shape) * dtype.itemsize)))
        rows = rows.to(dtype)
        if at_once == num_experts:
            return _part(rows, ends_E, weight, slice(0, num_experts), swapped)
        result = rows.new_empty(len(rows), shape[0] if swapped else shape[1])
        numbers_S = torch.arange(len(rows), device=rows.device)
        for first in range(0, num_experts, at_once):
            some = slice(first, min(first + at_once, num_experts))
            begin = ends_E[first - 1] if first else torch.zeros_like(ends_E[0])
            ends = ends_E[some] - begin
            # Their rows first: where they begin is known to the device alone.
            order_S = (numbers_S + begin) % len(rows)
            part = _part(rows[order_S], ends, weight, some, swapped)
            result[order_S] = torch.where((numbers_S < ends[-1]).unsqueeze(1), part, result[order_S])
        return result


def _part(rows: Tensor, ends: Tensor, packed: ExpertWeight, experts: slice, swapped: bool) -> Tensor:
    weight = packed.unpack(experts, rows.dtype)
    return moe._grouped_mm(rows, weight.transpose(1, 2) if swapped else weight, ends)
