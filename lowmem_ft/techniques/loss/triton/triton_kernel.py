"""Cross entropy of a row of logits as one Triton kernel: one read for its statistics, one more for its gradient."""

# Annotations and constants get their meaning from Triton's own compiler.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

BLOCK = 4096
"""Logits that a program reads at a time: 16 for each of 256 threads."""

OPTIONS = {"num_warps": 8}
"""Options that the kernel is compiled with."""


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """Return tanh with a relative error of 2**-22: a series near 0, where the quotient would cancel.

    CUDA's own is in a device library, which Triton's interpreter does not have.
    """
    square = x * x
    series = 62.0 / 2835.0 * square - 17.0 / 315.0
    series = (series * square + 2.0 / 15.0) * square - 1.0 / 3.0
    near = x + x * square * series
    power = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - power) / (1.0 + power)
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def _scaled_and_capped(
    logits: tl.tensor, scale: tl.float32, cap: tl.float32, CAPS: tl.constexpr
) -> tl.tensor:
    """Return the logits in float32, scaled and capped."""
    exact = logits.to(tl.float32) * scale
    if CAPS:
        exact = _tanh(exact / cap) * cap
    return exact


@triton.jit
def _statistics(
    logits: tl.tensor,
    num_columns: tl.int32,
    column: tl.tensor,
    scale: tl.float32,
    cap: tl.float32,
    label_share: tl.float32,
    spread: tl.float32,
    CAPS: tl.constexpr,
    SMOOTHS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return a row's maximum, the sum of the exponentials of what is below it, and what the label selects."""
    is_inside = (column >= 0) & (column < num_columns)
    of_label = _scaled_and_capped(tl.load(logits + column, is_inside, 0.0), scale, cap, CAPS)
    target = tl.where(is_inside, of_label, 0.0) * label_share
    lane = tl.arange(0, BLOCK)
    maximum = -3.0e38  # finite: minus itself it is 0
    total = 0.0
    for start in range(0, num_columns, BLOCK):
        inside = start + lane < num_columns
        block = tl.load(logits + start + lane, inside, 0.0)
        exact = _scaled_and_capped(block, scale, cap, CAPS)
        if SMOOTHS:
            target += tl.sum(tl.where(inside, exact, 0.0), 0) * spread
        exact = tl.where(inside, exact, -float("inf"))
        before = maximum
        maximum = tl.maximum(before, tl.max(exact, 0))
        total = total * tl.exp(before - maximum) + tl.sum(tl.exp(exact - maximum), 0)
    return maximum, total, target


@triton.jit(
    do_not_specialize=["first"],
    do_not_specialize_on_alignment=["labels", "log_sums", "targets", "factor_on_device"],
)
def cross_entropy_row(
    logits: tl.tensor,
    row_stride: tl.int64,
    num_columns: tl.int32,
    labels: tl.tensor,
    first: tl.int64,
    log_sums: tl.tensor,
    targets: tl.tensor,
    factor_on_device: tl.tensor,
    factor: tl.float32,
    scale: tl.float32,
    cap: tl.float32,
    label_share: tl.float32,
    spread: tl.float32,
    CAPS: tl.constexpr,
    SMOOTHS: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    WITH_STATISTICS: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute a row's statistics, its gradient, or both; ``cross_entropy_in_triton.py`` documents each argument."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    column = tl.load(labels + row) - first
    lane = tl.arange(0, BLOCK)

    if WITH_STATISTICS:
        maximum, total, target = _statistics(
            logits, num_columns, column, scale, cap, label_share, spread, CAPS, SMOOTHS, BLOCK
        )
        tl.store(log_sums + row, maximum + tl.log(total))
        tl.store(targets + row, target)
    else:
        maximum = tl.load(log_sums + row)
        total = 1.0

    if WITH_GRADIENT:
        share = 1.0 / total
        coefficient = scale * factor
        if HAS_FACTOR:
            coefficient = coefficient * tl.load(factor_on_device).to(tl.float32)
        for start in range(0, num_columns, BLOCK):
            inside = start + lane < num_columns
            block = tl.load(logits + start + lane, inside, 0.0)
            exact = _scaled_and_capped(block, scale, cap, CAPS)
            gradient = tl.exp(exact - maximum) * share
            gradient -= tl.where(start + lane == column, label_share, 0.0)
            if SMOOTHS:
                gradient -= spread
            if CAPS:
                capped = exact / cap
                gradient *= 1.0 - capped * capped
            gradient *= coefficient
            tl.store(logits + start + lane, gradient.to(logits.dtype.element_ty), inside)
