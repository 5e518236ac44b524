"""The update of a chunk as one Triton kernel: reads weight, master, averages and gradient once, and writes them once.

Multiplications and additions are those of the rules' own files, each rounded separately; nothing is fused.

Triton compiles a kernel once for each combination of types, constants and what it specialises on: by default whether a
number is 1 and whether a number or an address is divisible by 16. Random keys, the number of an element and scales are
each of these now and then, so specialisation on them is turned off: one variant per configuration, compiled in step 1.
"""

# Annotations and constants get their meaning from Triton's own compiler.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from lowmem_ft.optimizers.triton.triton_formats import (
    as_bits,
    as_float,
    codes_of,
    noise,
    read_codes,
    row_scales,
    upper_half,
)

ROWS = 4
"""Rows of 256 in a tile: 1024 elements for 128 threads, a warp for each row."""

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False, "maxnreg": 128}
"""Options that the kernel is compiled with.

Triton fuses by default (``TRITON_DEFAULT_FP_FUSION``): a product and the sum that takes it would be rounded once where
torch's operations round twice, and a weight would depend on which of the two updated it. With a limit on registers
that it does not reach, ptxas keeps all values in them; by itself it spills 8 bytes to reach 56.
"""


@triton.jit
def lerp(
    start: tl.tensor, end: tl.tensor, part: tl.float32, rest: tl.float32, FROM_END: tl.constexpr
) -> tl.tensor:
    """Interpolate like ``torch.lerp`` by ``part``; ``rest`` is 1 - part; FROM_END: part is a half or more."""
    return end - (end - start) * rest if FROM_END else start + part * (end - start)


@triton.jit
def _read_average(
    values: tl.tensor,
    scales: tl.tensor,
    lane: tl.tensor,
    inside: tl.tensor,
    row: tl.tensor,
    is_row: tl.tensor,
    STATE: tl.constexpr,
    OCTAVES: tl.constexpr,
    SIGNED: tl.constexpr,
) -> tl.tensor:
    """Return a running average in float32; 0 past the end."""
    if STATE == "fp32":
        return tl.load(values + lane, inside, 0.0)
    kept = tl.load(values + lane, inside, 0).to(tl.int32)
    if STATE == "bf16":
        return as_float(kept << 16)
    return read_codes(kept, tl.load(scales + row, is_row, 0.0), OCTAVES, SIGNED)


@triton.jit
def _write_average(
    value: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    lane: tl.tensor,
    inside: tl.tensor,
    row: tl.tensor,
    is_row: tl.tensor,
    first: tl.tensor,
    key: tl.tensor,
    STATE: tl.constexpr,
    OCTAVES: tl.constexpr,
    SIGNED: tl.constexpr,
) -> None:
    """Store a running average."""
    if STATE == "fp32":
        tl.store(values + lane, value, inside)
    elif STATE == "bf16":
        tl.store(values + lane, upper_half(as_bits(value), noise(lane, first, key, 1)), inside)
    else:
        value = tl.where(inside, value, 0.0)
        scale = row_scales(value)
        codes = codes_of(value, scale, noise(lane, first, key, 1), OCTAVES, SIGNED)
        tl.store(values + lane, codes.to(tl.int8 if SIGNED else tl.uint8), inside)
        tl.store(scales + row, scale, is_row)


@triton.jit
def _read_weight(
    weight: tl.tensor, beside: tl.tensor, lane: tl.tensor, inside: tl.tensor, MASTER: tl.constexpr
) -> tl.tensor:
    """Return the master weight in float32; 0 past the end."""
    if MASTER == "weight":
        return tl.load(weight + lane, inside, 0.0)
    bits = tl.load(weight + lane, inside, 0).to(tl.int32) << 16
    if MASTER == "fp32":
        copy = as_bits(tl.load(beside + lane, inside, 0.0))
        rest = copy - bits
        bits = tl.where((rest >= -0x8000) & (rest <= 0x8000), copy, bits)
    elif MASTER == "split16" or MASTER == "split24":
        low = tl.load(beside + lane, inside, 0).to(tl.int32) << (0 if MASTER == "split16" else 8)
        bits += tl.where((bits << 1) == 0, tl.maximum(low, 0), low)
    return as_float(bits)


@triton.jit
def _write_weight(
    w: tl.tensor,
    weight: tl.tensor,
    beside: tl.tensor,
    lane: tl.tensor,
    inside: tl.tensor,
    first: tl.tensor,
    key: tl.tensor,
    MASTER: tl.constexpr,
) -> None:
    """Store a master weight, and the weight that it rounds to."""
    if MASTER == "weight":
        tl.store(weight + lane, w, inside)
    else:
        bits = as_bits(w)
        addend = tl.full(bits.shape, 0x8000, tl.int32)
        if MASTER == "fp32":
            tl.store(beside + lane, w, inside)
        elif MASTER == "split16":
            tl.store(beside + lane, bits.to(tl.int16), inside)
        elif MASTER == "split24":
            bits8 = noise(lane, first, key, 2)
            tl.store(beside + lane, ((bits + bits8) >> 8).to(tl.int8), inside)
            addend += bits8
        elif MASTER == "stochastic_rounding":
            addend = noise(lane, first, key, 1)
        tl.store(weight + lane, upper_half(bits, addend), inside)


@triton.jit(
    do_not_specialize=["num_elements", "element", "key_of_weight", "key_0", "key_1"],
    do_not_specialize_on_alignment=["clip", "scales_0", "scales_1"],
)
def update_chunk(
    weight: tl.tensor,  # float32, or bfloat16 as int16
    beside: tl.tensor,  # the master's tensor, if it has one
    gradient: tl.tensor,  # bfloat16 as int16
    clip: tl.tensor,  # one float32
    values_0: tl.tensor,  # first average; bfloat16 as int16
    scales_0: tl.tensor,
    values_1: tl.tensor,
    scales_1: tl.tensor,
    num_elements: tl.int32,
    element: tl.int64,
    key_of_weight: tl.int64,
    key_0: tl.int64,
    key_1: tl.int64,
    c0: tl.float32,  # c0 to c7: the rule's constants, named where it uses them
    c1: tl.float32,
    c2: tl.float32,
    c3: tl.float32,
    c4: tl.float32,
    c5: tl.float32,
    c6: tl.float32,
    c7: tl.float32,
    RULE: tl.constexpr,
    MASTER: tl.constexpr,
    STATE_0: tl.constexpr,
    STATE_1: tl.constexpr,
    IS_HALF_GRADIENT: tl.constexpr,
    HAS_CLIP: tl.constexpr,
    FROM_END_0: tl.constexpr,
    FROM_END_1: tl.constexpr,
    SIGNED_OCTAVES: tl.constexpr,
    UNSIGNED_OCTAVES: tl.constexpr,
    IN_VECTORS: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Update ``ROWS * 256`` elements of a chunk; ``triton_update.py`` documents each argument.

    It is long for its arguments, a line each: a kernel takes pointers and numbers, and no record that would hold them.
    """
    if IN_VECTORS:  # for the compiler: a vector load must have the same mask throughout
        num_elements = num_elements // VECTOR * VECTOR
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    offset = first_row * 256
    weight += offset
    beside += offset
    gradient += offset
    values_0 += offset
    values_1 += offset
    scales_0 += first_row
    scales_1 += first_row
    row = tl.arange(0, ROWS)
    lane = row[:, None] * 256 + tl.arange(0, 256)[None, :]
    inside = offset + lane < num_elements
    is_row = offset + row * 256 < num_elements
    first = element + offset

    w = _read_weight(weight, beside, lane, inside, MASTER)
    if IS_HALF_GRADIENT:
        g = as_float(tl.load(gradient + lane, inside, 0).to(tl.int32) << 16)
    else:
        g = tl.load(gradient + lane, inside, 0.0).to(tl.float32)
    if HAS_CLIP:
        factor = tl.load(clip)
        g = g * factor
        if factor != factor:  # NaN: nothing is to change
            return
    a = g
    if STATE_0 != "none":
        a = _read_average(values_0, scales_0, lane, inside, row, is_row, STATE_0, SIGNED_OCTAVES, True)

    if RULE == "adamw":
        # decay, 1 - beta1, beta1, beta2, 1 - beta2, root of the second correction, eps, minus the step's length
        b = _read_average(values_1, scales_1, lane, inside, row, is_row, STATE_1, UNSIGNED_OCTAVES, False)
        a = lerp(a, g, c1, c2, FROM_END_0)
        b = b * c3 + (c4 * g) * g
        divisor = tl.full(b.shape, 1.0, tl.float32) * c5
        w = w * c0 + tl.math.div_rn(c7 * a, tl.math.div_rn(tl.math.sqrt_rn(b), divisor) + c6)
        _write_average(
            b, values_1, scales_1, lane, inside, row, is_row, first, key_1, STATE_1, UNSIGNED_OCTAVES, False
        )
    elif RULE == "lion":
        # decay, beta of the step, 1 - that, beta of the momentum, 1 - that, learning rate
        direction = lerp(g, a, c1, c2, FROM_END_0)
        direction = tl.where(direction > 0, 1.0, tl.where(direction < 0, -1.0, 0.0))
        w = w * c0 - direction * c5
        a = lerp(g, a, c3, c4, FROM_END_1)
    else:
        # weight decay, momentum, minus the learning rate
        direction = g + c0 * w
        if STATE_0 != "none":
            direction = a * c1 + direction
            a = direction
        w = w + c2 * direction

    if STATE_0 != "none":
        _write_average(
            a, values_0, scales_0, lane, inside, row, is_row, first, key_0, STATE_0, SIGNED_OCTAVES, True
        )

    _write_weight(w, weight, beside, lane, inside, first, key_of_weight, MASTER)
