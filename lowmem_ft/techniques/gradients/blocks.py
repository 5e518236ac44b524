"""Where the gradient of a matrix may be cut, so that an optimizer can apply each part by itself."""

from __future__ import annotations

import math

_BLOCK = 256
"""Elements of 8-bit optimizer state that share a scale, and are therefore updated together."""


def rows_per_block(num_columns: int) -> int:
    """The fewest rows that fill whole blocks: parts of a gradient begin at multiples of it.

    Args:
        num_columns: of the matrix.
    """
    return _BLOCK // math.gcd(_BLOCK, num_columns)
