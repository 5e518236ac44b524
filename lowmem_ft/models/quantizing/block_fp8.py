"""Weights in 8-bit floats with a scale for each block, as DeepSeek-V3 and Qwen3's FP8 models are published.

Weights and scales stay in memory as they are in the files. A product multiplies by the weights that they stand for, in
the type of a plain layer: inputs are not rounded to 8 bits, as inference kernels round them.

Axes: N tokens, E experts, O outputs and I inputs of a product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lowmem_ft.foundation.tensors.autocast_dtype import autocast_dtype


def scales_of(name: str) -> str:
    """Return the name of a weight's scales in files; they are factors, though it calls them inverse."""
    return f"{name}_scale_inv"


def unpack(weight: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the weights in a type, each product of a weight and its block's scale rounded once.

    Args:
        weight: shape (..., O, I), float8.
        scales: shape (..., blocks of outputs, blocks of inputs), in a floating type; the last block may be cut short.
        block: outputs and inputs of a block.
        dtype: a type that holds each value of ``weight``: float32, bfloat16 or float16.

    Returns:
        Shape (..., O, I).
    """
    rows, columns = block
    num_outputs, num_inputs = weight.shape[-2:]
    of_rows = scales.float().unsqueeze(-2).expand(*scales.shape[:-1], rows, scales.shape[-1])
    of_rows = of_rows.flatten(-3, -2)[..., :num_outputs, :]
    values, whole = weight.to(dtype), num_inputs // columns
    # In place: products are computed in float32, and rounded where they are written.
    in_blocks = values[..., : whole * columns].unflatten(-1, (whole, columns))
    in_blocks.mul_(of_rows[..., :whole].unsqueeze(-1))
    if num_inputs % columns:
        values[..., whole * columns :].mul_(of_rows[..., whole:])
    return values


class Fp8Linear(nn.Linear):
    """A frozen linear layer in 8-bit floats: transformers' ``FP8Linear`` with products that need none of its kernels.

    Attributes:
        weight: shape (O, I), float8_e4m3fn.
        weight_scale_inv: the scales of its blocks.
        block_size: outputs and inputs of a block.
    """

    weight_scale_inv: nn.Parameter
    block_size: tuple[int, int]

    def unpacked_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weights that the layer multiplies by, shape (O, I)."""
        return unpack(self.weight.data, self.weight_scale_inv.data, self.block_size, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return the product, in the type of a plain layer; backward unpacks again."""
        return _Product.apply(input, self)


class _Product(torch.autograd.Function):
    """The product with a packed weight, which is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Fp8Linear) -> Tensor:
        dtype = autocast_dtype(x) or x.dtype
        ctx.layer, ctx.dtype, ctx.of_product = layer, x.dtype, dtype
        bias = layer.bias if layer.bias is None else layer.bias.to(dtype)
        return F.linear(x.to(dtype), layer.unpacked_weight(dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_product: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_x = d_product.to(ctx.of_product) @ ctx.layer.unpacked_weight(ctx.of_product)
        return d_x.to(ctx.dtype), None


class Fp8Weight:
    """The packed weight of a layer's experts for one of their products.

    Args:
        module: an experts module, whose tensor is in 8-bit floats and has scales.
        name: the name of that tensor.
        block: outputs and inputs of a block.
        parts: matrices that are stored one below the other, gate and up, each with blocks of its own.
    """

    def __init__(self, module: Any, name: str, block: tuple[int, int], parts: int) -> None:
        self.module, self.name, self.block, self.parts = module, name, block, parts

    def make_room(self, dtype: torch.dtype, of_scales: torch.dtype) -> None:
        """Replace a tensor of experts on the meta device by weights of a type, and scales, without values."""
        (num_experts, num_outputs, num_inputs), (rows, columns) = self.shape, self.block
        of_rows = self.parts * -(-num_outputs // (self.parts * rows))
        for name, shape, of_name in (
            (self.name, self.shape, dtype),
            (scales_of(self.name), (num_experts, of_rows, -(-num_inputs // columns)), of_scales),
        ):
            values = torch.empty(shape, dtype=of_name, device="meta")
            self.module.register_parameter(name, nn.Parameter(values, requires_grad=False))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (E, O, I)."""
        return tuple(self.module._parameters[self.name].shape)

    def unpack(self, experts: slice, dtype: torch.dtype) -> Tensor:
        """Return some experts' weights in a type; shape (number of them, O, I)."""
        weight, scales = (
            self.module._parameters[name].data[experts].unflatten(1, (self.parts, -1))
            for name in (self.name, scales_of(self.name))
        )
        return unpack(weight, scales, self.block, dtype).flatten(1, 2)
