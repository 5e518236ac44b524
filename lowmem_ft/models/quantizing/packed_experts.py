"""Fused experts in fewer bits: their products, whatever the format, and NF4 as a format.

transformers keeps the experts of a layer in tensors of three axes. A product unpacks some experts at a time, keeps
nothing for backward except where each expert's rows end, and unpacks them again there. Rows are sorted by expert, and
the host never waits to learn how many each has.

bitsandbytes packs linear layers alone, and most of a mixture's weights are no such layers. In NF4 each tensor becomes
one 4-bit parameter, which holds for every expert the same bytes as a ``Linear4bit`` of its own, with scales that are
quantised too. Formats that checkpoints bring are in ``mxfp4.py`` and ``block_fp8.py``.

Axes: T tokens, K experts that a token passes, S = T * K rows, E experts, I inputs, O outputs of a product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.integrations import moe

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


def weights_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's tensors of experts; none unless transformers multiplies them by its interface."""
    if not hasattr(module, "has_gate") or not hasattr(module, "is_transposed"):
        return ()
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


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


class ExpertWeight(Protocol):
    """The packed weight of a layer's experts for one of their products."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights that are packed: (E, O, I), or (E, I, O) where the module stores them so."""
        ...

    def unpack(self, experts: slice, dtype: torch.dtype) -> Tensor:
        """Return some experts' weights in a type; shape (number of them, O, I) or (..., I, O)."""
        ...


class _Nf4Weight:
    """The weight that :func:`pack` makes of a module's tensor.

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
        packed: Any = self.module._parameters[self.name]
        return unpack(packed.data, self.state, experts, dtype)


class PackedExperts:
    """The forward pass of a module whose experts are packed, in the place of its own.

    Args:
        module: an experts module of transformers.
        compute_dtype: type of its products; None: autocast's, and without autocast that of the rows.
        weights: its packed weights, by the names of the tensors in whose place they are.
    """

    def __init__(
        self, module: Any, compute_dtype: torch.dtype | None, weights: Mapping[str, ExpertWeight]
    ) -> None:
        self.module, self.compute_dtype, self.weights = module, compute_dtype, weights

    @classmethod
    def install(cls, module: nn.Module, compute_dtype: torch.dtype) -> None:
        """Pack the tensors of a module in 4 bits that are not packed yet, and replace its forward."""
        for name in weights_of(module):
            weight = module._parameters[name]
            assert weight is not None
            if not hasattr(weight, "quant_state"):
                module._parameters[name] = pack(weight.data)
        weights = {name: _Nf4Weight(module, name) for name in weights_of(module)}
        module.forward = cls(module, compute_dtype, weights)  # type: ignore[method-assign]

    def __call__(self, hidden_TI: Tensor, experts_TK: Tensor, shares_TK: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, shape (T, I); see transformers' ``integrations/moe.py``."""
        module, (to_inner, to_outer) = self.module, weights_of(self.module)
        experts_S, order_S = experts_TK.flatten().sort(stable=True)
        everyone_E = torch.arange(module.num_experts, device=experts_S.device)
        ends_E = torch.searchsorted(experts_S, everyone_E, right=True, out_int32=True)
        rows = hidden_TI[order_S // experts_TK.shape[1]]
        rows = self._product(rows, to_inner, experts_S, ends_E)
        rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
        rows = self._product(rows, to_outer, experts_S, ends_E)
        if getattr(module, "has_post_expert_norm", False):  # since transformers 5.20
            rows = module.post_expert_norm(rows)
        rows = rows * shares_TK.flatten()[order_S].unsqueeze(-1)
        of_tokens = rows[order_S.argsort()].view(*experts_TK.shape, -1)
        return of_tokens.sum(1).to(hidden_TI.dtype)

    def _product(self, rows: Tensor, name: str, experts_S: Tensor, ends_E: Tensor) -> Tensor:
        product = _Product.apply(rows, ends_E, self, name)
        bias = getattr(self.module, f"{name}_bias", None) if self.module.has_bias else None
        return product if bias is None else product + bias[experts_S]

    def dtype_of_products(self, rows: Tensor) -> torch.dtype:
        """Return the type that weights are unpacked to for these rows."""
        return self.compute_dtype or product_dtype(rows)

    def multiply(
        self, rows: Tensor, ends_E: Tensor, name: str, dtype: torch.dtype, *, swapped: bool
    ) -> Tensor:
        """Multiply each expert's rows by its weight, or by the weight with its axes swapped; shape (S, O) or (S, I)."""
        weight = self.weights[name]
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


def product_dtype(rows: Tensor) -> torch.dtype:
    """Return the type in which a plain layer would multiply these rows: autocast's, or their own."""
    device = rows.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype


def _part(rows: Tensor, ends: Tensor, packed: ExpertWeight, experts: slice, swapped: bool) -> Tensor:
    weight = packed.unpack(experts, rows.dtype)
    return moe._grouped_mm(rows, weight.transpose(1, 2) if swapped else weight, ends)


class _Product(torch.autograd.Function):
    """The product of each expert's rows and its packed weight, which is frozen."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends_E: Tensor, experts: PackedExperts, name: str) -> Tensor:
        ctx.save_for_backward(ends_E)
        ctx.experts, ctx.of_weight, ctx.dtype = experts, name, rows.dtype
        ctx.of_products = experts.dtype_of_products(rows)
        swapped = not experts.module.is_transposed
        return experts.multiply(rows, ends_E, name, ctx.of_products, swapped=swapped).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_product: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (ends_E,) = ctx.saved_tensors
        swapped = ctx.experts.module.is_transposed
        d_rows = ctx.experts.multiply(d_product, ends_E, ctx.of_weight, ctx.of_products, swapped=swapped)
        return d_rows.to(ctx.dtype), None, None, None
