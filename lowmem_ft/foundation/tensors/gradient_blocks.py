"""Rows at which a matrix's gradient may be cut, so that an optimizer can apply each slice by itself."""

from __future__ import annotations

import math

_BLOCK = 256
"""Elements of 8-bit optimizer state that share a scale, and are therefore updated together."""


def rows_per_block(num_columns: int) -> int:
    """Return the fewest rows that fill whole blocks: slices of a gradient begin at multiples of it.

    Args:
        num_columns: columns of the matrix.
    """
    return _BLOCK // math.gcd(_BLOCK, num_columns)
