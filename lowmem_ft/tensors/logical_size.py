"""Weights that a tensor represents: their number is not that of its elements if two share a byte."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lowmem_ft.tensors.local_shards import whole_shape


def logical_numel(parameter: Tensor) -> int:
    """Return the number of weights in a parameter; packed ones record their shape, scales have none."""
    shape = _packed_shape(parameter)
    return math.prod(whole_shape(parameter) if shape is None else shape)


def has_packed_experts(model: nn.Module) -> bool:
    """Return whether a packed parameter holds a layer's experts, which are tensors of three axes."""
    shapes = map(_packed_shape, model.parameters())
    return any(shape is not None and len(shape) == 3 for shape in shapes)


def _packed_shape(parameter: Tensor) -> torch.Size | None:
    """Return the shape of the weights that a parameter has in fewer bits; None: it has plain ones."""
    state = getattr(parameter, "quant_state", None)  # bitsandbytes
    return getattr(parameter, "packed_shape", None) if state is None else state.shape
