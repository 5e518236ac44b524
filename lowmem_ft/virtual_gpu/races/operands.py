"""Which of an operator's tensors it reads and writes, and which bytes of memory those are."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.virtual_gpu.kernels.flops import is_free
from lowmem_ft.virtual_gpu.races.happens_before import Span

aten = torch.ops.aten

_COPIES = frozenset({aten.copy_.default, aten._to_copy.default})
_OUTPUT_OF = {"all_gather_copy_in": 1}
"""Operators whose schema does not say that they write an argument, and which; of a collective it is the first."""
_READ_NO_VALUES = frozenset(
    {"new_empty", "new_full", "new_ones", "new_zeros", "zeros_like", "ones_like", "full_like", "rand_like"}
)
_WAIT = frozenset({"equal", "is_nonzero", "item", "nonzero", "masked_select", "_unique2", "unique_dim"})
"""The host needs their result, or its size."""


@dataclass(frozen=True)
class Uses:
    """What an operator does with its arguments, by its schema.

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
    """By an operator's schema: what is aliased for writing is written, all else is read."""
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
    """The tensors that a call touches: each, whether it is written, and whether it is a result.

    Results that an argument's memory holds are among them; whoever asks knows what is new.
    """
    for key, argument in (*enumerate(args), *kwargs.items()):
        writes = key in uses.written
        if writes or uses.reads:
            for tensor in tensors_in(argument):
                yield tensor, writes, False
    for tensor in tensors_in(result):
        yield tensor, True, True


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of an argument or a result."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def span_of(tensor: Tensor) -> Span | None:
    """Where in its storage a tensor lies; None: it has no elements."""
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
