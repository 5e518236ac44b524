"""Costs on a virtual GPU of custom operators that run several kernels.

A trace sees such an operator once and counts its inputs and results. Only its author knows what happens in between.
The rest comes from torch's own registries: ``torch.library.register_fake`` gives the shape of the result, and
``torch.utils.flop_counter.register_flop_formula`` the floating-point operations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload

from lowmem_ft.foundation.errors import UserError


@dataclass(frozen=True, kw_only=True)
class OperatorCost:
    """Functions of an operator's own arguments.

    Args:
        moved_bytes: bytes that all of its kernels together read and write in device memory.
        temporary_bytes: peak bytes that it takes in addition to its results, and gives back when it returns.
        launches: kernels that it runs one after the other.
        irrelevant: arguments on which neither these nor the operator's fake rule depend; None: not declared.
        launched_by_triton: whether Triton launches it.
    """

    moved_bytes: Callable[..., int]
    temporary_bytes: Callable[..., int]
    launches: Callable[..., int]
    irrelevant: frozenset[str] | None = None
    launched_by_triton: bool = False


_COSTS: dict[OpOverload, OperatorCost] = {}


def register_operator_cost(
    operator: OpOverload,
    *,
    moved_bytes: Callable[..., int],
    temporary_bytes: Callable[..., int] | None = None,
    launches: Callable[..., int] | None = None,
    irrelevant: Collection[str] | None = None,
    launched_by_triton: bool = False,
) -> None:
    """Register an operator's cost with every virtual GPU of this process; a later call replaces an earlier one.

        register_operator_cost(
            torch.ops.mine.rotate.default,
            moved_bytes=lambda x, angles: 6 * x.nbytes,
            temporary_bytes=lambda x, angles: x.nbytes,
            launches=lambda x, angles: 2,
        )

    Args:
        operator: one overload of it.
        moved_bytes: called with the operator's arguments; bytes that its kernels read and write in device memory.
        temporary_bytes: called likewise; bytes that it takes in addition to its results and gives back. None: no bytes.
        launches: called likewise; the number of kernels it runs, which the host issues one after the other. None: one.
        irrelevant: names of arguments, such as a seed, on which neither these functions nor the operator's fake rule
            depend. If given, even as ``()``, a trace does not call them again where all other arguments and the shapes,
            strides, types and devices of the tensors are as before. None: it calls them each time.
        launched_by_triton: whether Triton launches it and looks at its arguments, which keeps the host for as long as
            several operators of torch.

    Raises:
        UserError: if ``operator`` is not an overload.
    """
    if not isinstance(operator, OpOverload):
        raise UserError(
            "The cost of an operator belongs to one overload, such as torch.ops.mine.rotate.default, got "
            f"{operator}. Name the overload."
        )
    _COSTS[operator] = OperatorCost(
        moved_bytes=moved_bytes,
        temporary_bytes=temporary_bytes or _nothing,
        launches=launches or _one,
        irrelevant=None if irrelevant is None else frozenset(irrelevant),
        launched_by_triton=launched_by_triton,
    )


def registered_cost(operator: Any) -> OperatorCost | None:
    """Return the cost that :func:`register_operator_cost` has registered for an operator, if any."""
    return _COSTS.get(operator)


def _nothing(*args: Any, **kwargs: Any) -> int:
    return 0


def _one(*args: Any, **kwargs: Any) -> int:
    return 1
