"""Weights that a tensor represents: their number is not that of its elements if two share a byte."""

from __future__ import annotations

import math

from torch import Tensor, nn

from lowmem_ft.tensors.local_shards import whole_shape


def logical_numel(parameter: Tensor) -> int:
    """Return the number of weights in a parameter; bitsandbytes' 4-bit ones record the shape they were made from."""
    state = getattr(parameter, "quant_state", None)
    return math.prod(whole_shape(parameter) if state is None else state.shape)


def has_packed_experts(model: nn.Module) -> bool:
    """Return whether a 4-bit parameter holds a layer's experts, which are tensors of three axes."""
    states = (getattr(parameter, "quant_state", None) for parameter in model.parameters())
    return any(state is not None and len(state.shape) == 3 for state in states)
