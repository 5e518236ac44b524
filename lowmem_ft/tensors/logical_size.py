"""Number of weights that a tensor represents, which is not its number of elements if two share a byte."""

from __future__ import annotations

import math

from torch import Tensor

from lowmem_ft.tensors.local_shards import whole_shape


def logical_numel(parameter: Tensor) -> int:
    """Return the number of weights in a parameter; bitsandbytes' 4-bit ones record the shape they were made from."""
    state = getattr(parameter, "quant_state", None)
    return math.prod(whole_shape(parameter) if state is None else state.shape)
