"""Experts in MXFP4, as gpt-oss is published: 4-bit floats, of which 32 share a scale that is a power of two.

The bytes stay in memory as they are in the files: ``*_blocks`` hold two weights a byte, the lower half first, and
``*_scales`` an exponent for each block (Open Compute Project, "OCP Microscaling Formats (MX)
Specification v1.0", 2023).

Axes: E experts, O outputs and I inputs of a product, G = I / 32 blocks of an output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCK = 32
"""Weights that share a scale."""

PAIRS = "pairs_of_mxfp4"
"""The buffer with the two weights of each byte."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by the lower three bits of a weight; the fourth bit is its sign."""

_BIAS = 127
"""Addend of an exponent as it is stored."""


def names_of(name: str) -> tuple[str, str]:
    """Return the names that a tensor of experts has in files: of its blocks and of its scales."""
    return "_".join((name, "blocks")), "_".join((name, "scales"))


def unpack(blocks: Tensor, scales: Tensor, pairs: Tensor) -> Tensor:
    """Return the weights in the type of ``pairs``, rounded once where it cannot hold one.

    Args:
        blocks: shape (..., G, 16), uint8.
        scales: shape (..., G), uint8.
        pairs: from :func:`pairs_of_bytes`.

    Returns:
        Shape (..., G * 32).
    """
    values = F.embedding(blocks.int(), pairs).view(*scales.shape, BLOCK)
    # In place: the product is computed in float32, and rounded where it is written.
    values.mul_(torch.pow(2.0, scales.int() - _BIAS).unsqueeze(-1))
    return values.flatten(-2)


def pairs_of_bytes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the two weights that each byte holds before they are scaled, shape (256, 2)."""
    values = torch.tensor([*_MAGNITUDES, *(-one for one in _MAGNITUDES)], dtype=dtype)
    codes = torch.arange(256)
    return torch.stack((values[codes & 15], values[codes >> 4]), 1).to(device)


class Mxfp4Weight:
    """The packed weight of a layer's experts for one of their products.

    Args:
        module: an experts module, with blocks and scales in the place of a tensor.
        name: the name of that tensor.
    """

    def __init__(self, module: Any, name: str) -> None:
        self.module, self.name = module, name

    @classmethod
    def make_room(cls, module: nn.Module, name: str) -> None:
        """Replace a tensor of experts on the meta device by blocks and scales without values."""
        weight = module._parameters.pop(name)
        assert weight is not None
        num_experts, first, second = weight.shape
        num_outputs, num_inputs = (second, first) if module.is_transposed else (first, second)
        shape = (num_experts, num_outputs, num_inputs // BLOCK)
        for stored, of_stored in zip(names_of(name), ((*shape, BLOCK // 2), shape), strict=True):
            values = torch.empty(of_stored, dtype=torch.uint8, device=weight.device)
            module.register_parameter(stored, nn.Parameter(values, requires_grad=False))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that the blocks replace: (E, O, I), or (E, I, O) where the module stores it so."""
        num_experts, num_outputs, num_blocks = self.module._parameters[names_of(self.name)[1]].shape
        shape = (num_outputs, num_blocks * BLOCK)
        return (num_experts, *(reversed(shape) if self.module.is_transposed else shape))

    def unpack(self, experts: slice, dtype: torch.dtype) -> Tensor:
        """Return some experts' weights in a type; shape (number of them, O, I) or (..., I, O)."""
        blocks, scales = (self.module._parameters[stored] for stored in names_of(self.name))
        pairs = self.module._buffers[PAIRS].to(dtype)
        values = unpack(blocks.data[experts], scales.data[experts], pairs)
        return values.transpose(1, 2) if self.module.is_transposed else values
