"""The formats of weights, masters and averages in Triton: the arithmetic of ``operators.py``, in registers.

Every function takes and returns a tile of (rows, 256), a row for each block of 8-bit state, and gives the same bits as
its counterpart there.
"""

# Annotations and constants get their meaning from Triton's own compiler.
# pyright: reportOperatorIssue=false

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def noise(lane: tl.tensor, first: tl.tensor, key: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Return the bits of ``counter_random.random_bits`` (int32).

    Args:
        lane: numbers of the elements in the tile (int32).
        first: number of the tile's first element in the parameter (int64).
        key: key of the stream (int64).
        SHIFT: 2 for 8 bits, 1 for 16: 2**SHIFT elements share a hash.
    """
    lane += (first & ((1 << SHIFT) - 1)).to(tl.int32)
    word = (first >> SHIFT).to(tl.uint32) + (lane >> SHIFT).to(tl.uint32)
    bits = word * 0x9E3779B1 + key.to(tl.uint32)
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= bits >> 15
    bits *= 0x846CA68B
    bits ^= bits >> 16
    width: tl.constexpr = 32 >> SHIFT
    place = (lane & ((1 << SHIFT) - 1)) * width
    return ((bits >> place.to(tl.uint32)) & ((1 << width) - 1)).to(tl.int32)


@triton.jit
def as_float(bits: tl.tensor) -> tl.tensor:
    """Return the float32 with these bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def as_bits(value: tl.tensor) -> tl.tensor:
    """Return the bits of a float32."""
    return value.to(tl.int32, bitcast=True)


@triton.jit
def upper_half(bits: tl.tensor, addend: tl.tensor) -> tl.tensor:
    """Return the upper half (int16) of ``bits + addend``, with ``addend`` up to 0xFFFF; NaN stays NaN."""
    safe = tl.minimum(bits & 0x7FFFFFFF, 0x7FFF0000) | (bits & -2147483648)
    return ((safe + addend) >> 16).to(tl.int16)


@triton.jit
def read_codes(codes: tl.tensor, scale: tl.tensor, OCTAVES: tl.constexpr, SIGNED: tl.constexpr) -> tl.tensor:
    """Decode float32 from 8-bit codes (as int32) and the scale of each row."""
    if SIGNED:
        value = as_float((tl.abs(codes) << 20) + ((127 - OCTAVES) << 23)) - 1.0 / (1 << OCTAVES)
        value = tl.where(codes < 0, -value, value)
    else:
        value = as_float((codes << 20) + ((127 - OCTAVES) << 23)) - 1.0 / (1 << OCTAVES)
    return value * scale[:, None]


@triton.jit
def row_scales(value: tl.tensor) -> tl.tensor:
    """Return the largest magnitude of each row, at least the smallest normal number; NaN if there is one."""
    # Magnitudes have the order of their bits, with NaN above all.
    return as_float(tl.maximum(tl.max(as_bits(value) & 0x7FFFFFFF, 1), 0x00800000))


@triton.jit
def codes_of(
    value: tl.tensor, scale: tl.tensor, bits16: tl.tensor, OCTAVES: tl.constexpr, SIGNED: tl.constexpr
) -> tl.tensor:
    """Return 8-bit codes (as int32), rounded by 16 random bits."""
    share = tl.math.div_rn(tl.abs(value), tl.broadcast_to(scale[:, None], value.shape)) + 1.0 / (1 << OCTAVES)
    codes = (as_bits(share) - ((127 - OCTAVES) << 23) + (bits16 << 4)) >> 20
    if SIGNED:
        sign = as_bits(value) >> 31
        return (codes ^ sign) - sign
    return tl.maximum(codes, 1)
