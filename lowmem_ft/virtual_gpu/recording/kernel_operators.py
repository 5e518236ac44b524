"""Operators that represent launches of kernels which are not run: the trace sees one operator for each launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lowmem_ft.foundation.tensors.operator_costs import register_operator_cost

_OF_TRITON, _OF_CUDA = "triton", "lowmem_ft_cuda"
"""Namespaces of the operators that represent launches of Triton kernels, and of kernels in compiled extensions."""

_LIBRARIES = {name: torch.library.Library(name, "FRAGMENT") for name in (_OF_TRITON, _OF_CUDA)}
_SCHEMA = "(Tensor[] read, Tensor(a!)[] written, int num_bytes, int flops) -> ()"


def record_kernel(
    name: str,
    read: Sequence[Tensor],
    written: Sequence[Tensor],
    *,
    num_bytes: int,
    flops: int = 0,
    by_triton: bool = True,
) -> None:
    """Record the launch of a kernel as one operator, under the virtual GPU that is active.

    Autograd does not see it, as with a real launch: no graph, and no new version of what is written.

    Args:
        name: name of the kernel.
        read: tensors that it only reads; the type of the first is that of its products.
        written: tensors that it writes.
        num_bytes: bytes that it reads and writes in device memory.
        flops: floating-point operations of its products.
        by_triton: whether Triton launches it.
    """
    with torch.no_grad():
        _operator(name, by_triton)(list(read), list(written), num_bytes, flops)


@functools.cache
def _operator(name: str, by_triton: bool) -> Any:
    namespace = _OF_TRITON if by_triton else _OF_CUDA
    library = _LIBRARIES[namespace]
    library.define(f"{name}{_SCHEMA}")
    torch.library.register_fake(f"{namespace}::{name}", _makes_nothing, lib=library)
    packet = getattr(getattr(torch.ops, namespace), name)
    register_operator_cost(
        packet.default, moved_bytes=_moved_bytes, irrelevant=(), launched_by_triton=by_triton
    )
    register_flop_formula(packet, get_raw=True)(_flops)
    return packet


def _makes_nothing(read: list[Tensor], written: list[Tensor], num_bytes: int, flops: int) -> None:
    """Return nothing: a kernel writes into its arguments."""


def _moved_bytes(read: list[Tensor], written: list[Tensor], num_bytes: int, flops: int) -> int:
    return num_bytes


def _flops(
    read: list[Tensor], written: list[Tensor], num_bytes: int, flops: int, **of_counter: object
) -> int:
    return flops
