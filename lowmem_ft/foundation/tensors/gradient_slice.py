"""The unit of an optimizer's update: a slice of a parameter whose gradient is finished.

The package uses one word for each kind of piece. A *slice* is a run of a flattened parameter's elements. A *chunk* is
the amount that a loop takes at once, of a slice or of a batch's tokens, so that its temporaries stay that small. A
*tile* is some rows of a matrix, or tokens of a sequence, for which a layer is computed separately. A *block* shares a
scale in a quantised format, or is the unit that an allocator hands out.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


class GradientSlice(NamedTuple):
    """The finished gradient of a slice of a parameter.

    Args:
        parameter: one of the optimizer's.
        gradient: gradient of that slice; contiguous, of its shape or flat, of any floating type. The update runs on its
            device; a weight stored elsewhere is copied there with its state.
        start: index of the slice's first element in the flattened parameter. See ``slice_unit`` of the optimizer.
    """

    parameter: nn.Parameter
    gradient: Tensor
    start: int = 0
