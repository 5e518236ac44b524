"""What an optimizer can update by itself: a slice of a parameter whose gradient is finished.

One word each for what is cut, in the whole package. A *slice* is a run of a flattened parameter's elements. A *chunk*
is what a loop takes at once, of a slice or of a batch's tokens, so that its temporaries stay that small. A *tile* is
some rows of a matrix, or tokens of a sequence, for which a layer is computed by itself. A *block* shares a scale in a
quantised format, or is what an allocator hands out.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class GradientSlice:
    """The finished gradient of a slice of a parameter.

    Args:
        parameter: one of the optimizer's.
        gradient: of that slice; contiguous, of its shape or flat, of any floating type. The update runs on its device;
            a weight that waits elsewhere visits there with its state.
        start: number of the slice's first element in the flattened parameter. See ``slice_unit`` of the optimizer.
    """

    parameter: nn.Parameter
    gradient: Tensor
    start: int = 0
