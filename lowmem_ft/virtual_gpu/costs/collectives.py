"""Collectives in the trace of one rank: operators of ``torch.distributed``, FSDP2 and DTensor.

Each collective counts the bytes that a rank sends with NCCL's ring, which the slowest link has to carry: with N ranks,
(N - 1) / N of the bytes gathered or scattered, and twice that for an all-reduce.
Source: nccl-tests, doc/PERFORMANCE.md ("Bus Bandwidth").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard  # noqa: F401 - registers torch.ops.fsdp

from lowmem_ft.foundation.memory.category import Category
from lowmem_ft.virtual_gpu.calls.work import Work

COLLECTIVE_LIBRARIES = frozenset({"c10d", "fsdp", "_c10d_functional"})

_c10d, _fsdp, _functional = torch.ops.c10d, torch.ops.fsdp, torch.ops._c10d_functional
_GATHER, _SCATTER = _c10d._allgather_base_.default, _c10d._reduce_scatter_base_.default
_SUMS = frozenset({_c10d.allreduce_.default, _c10d.allreduce_coalesced_.default})
_BROADCAST = _c10d.broadcast_.default
_COPY_IN, _COPY_OUT = _fsdp.all_gather_copy_in.default, _fsdp.split_with_sizes_copy.default
_CHUNK_CAT = _fsdp.chunk_cat.default
_GATHER_NEW, _SCATTER_NEW = (
    _functional.all_gather_into_tensor.default,
    _functional.reduce_scatter_tensor.default,
)
_SUMS_NEW = frozenset({_functional.all_reduce.default, _functional.all_reduce_.default})
_EXCHANGE_NEW, _BROADCAST_NEW = _functional.all_to_all_single.default, _functional.broadcast.default

WAIT_FOR_RESULT = _functional.wait_tensor.default
"""Operator that returns the tensor it is given, and not a new one as its fake rule does."""


def purposes_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Tensor, Category]]:
    """Yield those tensors of a collective whose purpose is known, with their category.

    Args:
        func: an operator of :data:`COLLECTIVE_LIBRARIES`.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    if func is _GATHER:
        yield args[0], "communication"
    elif func is _SCATTER:
        yield args[0], "communication"
        yield args[1], "communication"
    elif func is _COPY_OUT:
        for gathered in kwargs["out"]:
            yield gathered, "communication"


def collective_of(func: Any, args: tuple[Any, ...]) -> Work | None:
    """Return a collective as work without a position yet; None for other operators."""
    if func is _GATHER:
        return _work("all_gather", args[0].nbytes, args[2], 1)
    if func is _SCATTER:
        return _work("reduce_scatter", args[1].nbytes, args[2], 1)
    if func in _SUMS:
        return _work("all_reduce", sum(tensor.nbytes for tensor in args[0]), args[1], 2)
    if func is _BROADCAST:
        return _work("broadcast", sum(tensor.nbytes for tensor in args[0]), args[1], 1)
    if func is _GATHER_NEW:
        return _work("all_gather", args[1] * args[0].nbytes, args[2], 1)
    if func is _SCATTER_NEW:
        return _work("reduce_scatter", args[0].nbytes, args[3], 1)
    if func in _SUMS_NEW:
        return _work("all_reduce", args[0].nbytes, args[2], 2)
    if func is _EXCHANGE_NEW:
        return _work("all_to_all", args[0].nbytes, args[3], 1)
    if func is _BROADCAST_NEW:
        return _work("broadcast", args[0].nbytes, args[2], 1)
    return None


def bytes_copied(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the bytes that one of FSDP2's copies reads and writes; None for other operators.

    Their arguments alone do not tell: they include the whole output tensors, of which a copy fills a part.
    """
    if func is _COPY_IN:
        return 2 * sum(tensor.nbytes for tensor in args[0])
    if func is _COPY_OUT:
        return 2 * args[0].nbytes
    if func is _CHUNK_CAT:
        return sum(tensor.nbytes for tensor in args[0]) + kwargs["out"].nbytes
    return None


def _work(name: str, num_bytes: int, group: Any, passes: int) -> Work:
    size = _process_group(group).size()
    return Work("collective", position=0, name=name, num_bytes=passes * num_bytes * (size - 1) // size)


def _process_group(group: Any) -> torch.distributed.ProcessGroup:
    """Return the group that an operator's argument means: its name, or the group itself in one of two wrappings."""
    if isinstance(group, str):
        name: Any = group
        return torch.distributed.distributed_c10d._resolve_process_group(name)
    if isinstance(group, torch.distributed.ProcessGroup):
        return group
    return torch.distributed.ProcessGroup.unbox(group)
