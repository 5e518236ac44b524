"""Weights that a tensor represents: their number is not that of its elements if two share a byte."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from lowmem_ft.foundation.tensors.local_shards import whole_shape

PART_OF_ANOTHER = "lowmem_ft_part_of_another"
"""Attribute of a parameter that is a view of another parameter of its model."""


def logical_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the weights in a parameter; packed ones record it, scales of a packed one have none."""
    shape = _recorded_shape(parameter)
    return tuple(whole_shape(parameter) if shape is None else shape)


def logical_numel(parameter: Tensor) -> int:
    """Return the number of weights in a parameter."""
    return math.prod(logical_shape(parameter))


def num_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the number of a model's weights, and of those that are trained; a weight in two parameters counts once.

    If only some rows of a table are trained, they are a parameter of their own that is part of the table.
    """
    sizes: dict[nn.Parameter, int] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            # FSDP2 drops the state of a 4-bit weight, which its layer keeps.
            state = getattr(module, "quant_state", None) if name == "weight" else None
            sizes[parameter] = logical_numel(parameter) if state is None else math.prod(state.shape)
    parts = sum(size for parameter, size in sizes.items() if getattr(parameter, PART_OF_ANOTHER, False))
    trainable = sum(size for parameter, size in sizes.items() if parameter.requires_grad)
    return sum(sizes.values()) - parts, trainable


def is_packed(parameter: Tensor) -> bool:
    """Return whether a parameter holds weights in 4 or 8 bits, or their scales."""
    return _recorded_shape(parameter) is not None or not parameter.is_floating_point()


def has_packed_experts(model: nn.Module) -> bool:
    """Return whether a packed parameter holds a layer's experts, which are tensors of three axes."""
    return any(is_packed(one) and len(logical_shape(one)) == 3 for one in model.parameters())


def _recorded_shape(parameter: Tensor) -> Sequence[int] | None:
    state = getattr(parameter, "quant_state", None)  # bitsandbytes' 4-bit ones
    return getattr(parameter, "packed_shape", None) if state is None else state.shape
