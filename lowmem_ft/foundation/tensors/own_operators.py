"""Our own operators of torch: ``lowmem_ft::NAME``, each with its fake rule and its costs on a virtual GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from lowmem_ft.foundation.devices import has_values, is_virtual
from lowmem_ft.foundation.tensors.operator_costs import register_operator_cost

_LIBRARY = torch.library.Library("lowmem_ft", "FRAGMENT")


def register_operator(
    function: Callable[..., Any],
    schema: str,
    fake: Callable[..., Any],
    *,
    moved_bytes: Callable[..., int],
    temporary_bytes: Callable[..., int] | None = None,
    launches: Callable[..., int] | None = None,
    irrelevant: Collection[str],
    launched_by_triton: bool = False,
) -> Callable[..., Any]:
    """Register a function as operator ``lowmem_ft::NAME``, with fake rule and costs for a trace; return the operator.

    Args:
        function: the implementation; its name is the operator's.
        schema: its arguments and results.
        fake: returns only the result's shape.
        moved_bytes: bytes read and written by all of its kernels.
        temporary_bytes: peak bytes in addition to the result.
        launches: number of its kernels; None: one.
        irrelevant: arguments on which none of these depends.
        launched_by_triton: whether it launches a Triton kernel.
    """
    name = function.__name__
    _LIBRARY.define(f"{name}{schema}")
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lowmem_ft::{name}", fake, lib=_LIBRARY)
    operator = getattr(torch.ops.lowmem_ft, name)
    register_operator_cost(
        operator.default,
        moved_bytes=moved_bytes,
        temporary_bytes=temporary_bytes,
        launches=launches,
        irrelevant=irrelevant,
        launched_by_triton=launched_by_triton,
    )
    return operator


def operators_are_seen(tensor: torch.Tensor) -> bool:
    """Return whether a call of an operator does more than run its function: in a trace, a compiler, on fake tensors.

    Args:
        tensor: one of its arguments.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    return is_virtual(tensor.device) or not has_values(tensor)
