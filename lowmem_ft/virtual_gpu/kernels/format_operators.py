"""What the optimizers' own operators (``lowmem_ft/optimizers/operators.py``) take and move on a device.

They are one entry in a trace and a dozen kernels in truth. A test runs their implementations and counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import lowmem_ft.optimizers.operators  # noqa: F401 (registers them)
from lowmem_ft.catalog.gpu import Gpu

_ops = torch.ops.lowmem_ft

SCRATCH_BYTES: dict[Any, int] = {
    _ops.write_split16.default: 4,
    _ops.write_split24.default: 8,
    _ops.write_nearest.default: 4,
    _ops.write_stochastic.default: 8,
    _ops.write_blocks.default: 10,
}
"""Of temporaries beside the result at the most, by the element."""

MOVED_BYTES: dict[Any, int] = {
    _ops.read_split.default: 32,
    _ops.write_split16.default: 64,
    _ops.write_split24.default: 129,
    _ops.write_nearest.default: 56,
    _ops.write_stochastic.default: 134,
    _ops.read_blocks.default: 56,
    _ops.write_blocks.default: 180,
}
"""Read and written by all kernels together, by the element; of averages with a sign, which take more."""


def scratch_of_format(call: dict[str, Any], result: Any, gpu: Gpu, *, func: Any) -> Iterator[int]:
    """The temporaries of an operator that writes a float32 chunk into a format."""
    yield SCRATCH_BYTES[func] * call["value"].numel()


def scratch_of_signed_blocks(call: dict[str, Any], result: Any, gpu: Gpu) -> Iterator[int]:
    """The signs of the codes, a byte each."""
    if call["signed"]:
        yield call["codes"].numel()


def bytes_moved_by_format(func: Any, inputs: list[Tensor]) -> int | None:
    """Bytes that one of these operators reads and writes; None for any other."""
    by_element = MOVED_BYTES.get(func)
    return None if by_element is None else by_element * inputs[0].numel()
