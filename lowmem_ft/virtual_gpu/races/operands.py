"""Tensors that an operator reads and writes, and the bytes of memory that they cover."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.virtual_gpu.calls.fake_results import tensors_in
from lowmem_ft.virtual_gpu.costs.flops import is_free
from lowmem_ft.virtual_gpu.races.happens_before import Span

aten = torch.ops.aten

_COPIES = frozenset({aten.copy_.default, aten._to_copy.default})
_OUTPUT_OF = {"all_gather_copy_in": 1}
"""Operators that write an argument without saying so in their schema, and its position; 0 for collectives."""
_READ_NO_VALUES = frozenset(
    {"new_empty", "new_full", "new_ones", "new_zeros", "zeros_like", "ones_like", "full_like", "rand_like"}
)
_WAIT = frozenset({"equal", "is_nonzero", "item", "nonzero", "masked_select", "_unique2", "unique_dim"})
"""Operators whose result, or its size, the host needs."""


@dataclass(frozen=True)
class Uses:
    """An operator's use of its arguments, by its schema.

    Args:
        touches: whether it reads or writes any memory: views and allocations do not.
        is_copy: whether it copies one tensor, perhaps between the host and the device.
        reads: whether it reads the values of arguments that it does not write.
        waits: whether the host waits for its result.
        written: positions and names of arguments that it writes.
    """

    touches: bool
    is_copy: bool
    reads: bool
    waits: bool
    written: frozenset[int | str]


@functools.cache
def uses_of(func: Any) -> Uses:
    """Derive an operator's uses from its schema: an argument aliased for writing is written, all others are read."""
    name = func._opname
    unsaid = 0 if func.namespace == "c10d" and name.endswith("_") else _OUTPUT_OF.get(name)
    pairs = [
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if position == unsaid or (argument.alias_info is not None and argument.alias_info.is_write)
    ]
    return Uses(
        touches=name in _WAIT or not is_free(func),
        is_copy=func in _COPIES,
        reads=name not in _READ_NO_VALUES,
        waits=name in _WAIT,
        written=frozenset(key for pair in pairs for key in pair),
    )


def operands(
    uses: Uses, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Iterator[tuple[Tensor, bool, bool]]:
    """Yield the tensors that a call touches: each, whether it is written, and whether it is a result.

    Results in an argument's memory are included; the caller knows which memory is new.
    """
    for key, argument in (*enumerate(args), *kwargs.items()):
        writes = key in uses.written
        if writes or uses.reads:
            for tensor in tensors_in((argument,)):
                yield tensor, writes, False
    for tensor in tensors_in((result,)):
        yield tensor, True, True


def span_of(tensor: Tensor) -> Span | None:
    """Return the bytes of its storage that a tensor covers; None if it has no elements."""
    numel, itemsize = tensor.numel(), tensor.element_size()
    if not numel:
        return None
    start = int(tensor.storage_offset()) * itemsize
    if tensor.is_contiguous():
        return Span(start, start + numel * itemsize)
    shape, strides = tensor.shape, tensor.stride()
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    stop = start + (last + 1) * itemsize
    if last + 1 == numel:  # dense, in another order of dimensions
        return Span(start, stop)
    return Span(start, stop, tuple(shape), tuple(stride * itemsize for stride in strides), itemsize)
