"""Facts about unknown numbers: they are finite, and each equals itself.

Checks for overflow (``isfinite``, ``isnan``, ``isinf``, ``x != x``) reach a trace as comparisons, with infinity or of a
tensor with itself. Their answers are the same for every element: a *uniform* tensor, of which one element represents
all, whatever its size. Some results are uniform though only one of the operator's tensors is known: anything or-ed with
True is True, which is how ``generate`` learns that it has reached its length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

aten = torch.ops.aten

Number = bool | int | float

_ASKS_IF_FINITE = {
    aten.isnan.default: False,
    aten.isinf.default: False,
    aten.isposinf.default: False,
    aten.isneginf.default: False,
    aten.isfinite.default: True,
}

_COMPARISONS: dict[Any, Callable[[Number, Number], bool]] = {
    comparison: rule
    for operator, rule in (
        (aten.eq, lambda one, other: one == other),
        (aten.ne, lambda one, other: one != other),
        (aten.lt, lambda one, other: one < other),
        (aten.le, lambda one, other: one <= other),
        (aten.gt, lambda one, other: one > other),
        (aten.ge, lambda one, other: one >= other),
    )
    for comparison in (operator.Tensor, operator.Scalar)
}

_AND = frozenset(
    {
        *(aten.bitwise_and.Tensor, aten.bitwise_and_.Tensor, aten.__iand__.Tensor),
        *(aten.logical_and.default, aten.logical_and_.default, aten.mul.Tensor, aten.mul_.Tensor),
    }
)
_OR = frozenset(
    {
        *(aten.bitwise_or.Tensor, aten.bitwise_or_.Tensor, aten.__ior__.Tensor),
        *(aten.logical_or.default, aten.logical_or_.default),
    }
)
_NOT = frozenset({aten.logical_not.default, aten.bitwise_not.default})
_SAME = frozenset(
    {
        *(aten.all.default, aten.all.dim, aten.all.dims, aten.any.default, aten.any.dim, aten.any.dims),
        *(aten._to_copy.default, aten.clone.default),
    }
)
_COUNT = frozenset({aten.sum.default, aten.count_nonzero.default})
_MAY_BE_UNIFORM = frozenset({*_ASKS_IF_FINITE, *_COMPARISONS, *_AND, *_OR, *_NOT, *_SAME, *_COUNT})


def uniform_value(
    func: Any, args: tuple[Any, ...], result: Tensor, known: Callable[[Tensor], Tensor | None]
) -> Number | None:
    """Return the value of each element of an operator's boolean or integer result, or None if that is unknown.

    Args:
        func: the operator.
        args: its arguments.
        result: what it returned.
        known: returns the values of a tensor on the CPU, if they are known.
    """
    if func not in _MAY_BE_UNIFORM:
        return None
    if func in _ASKS_IF_FINITE:
        return _ASKS_IF_FINITE[func]
    if func in _COMPARISONS:
        return _compared(_COMPARISONS[func], args[0], args[1], known)
    if func in _OR and result.dtype != torch.bool:
        return None
    if func in _AND or func in _OR:
        return _joined(func in _OR, [_of_all(argument, known) for argument in args[:2]])
    value = _of_all(args[0], known)
    if not isinstance(value, bool):
        return None
    if func in _NOT:
        return not value
    return value * args[0].numel() if func in _COUNT else value


def _of_all(argument: Any, known: Callable[[Tensor], Tensor | None]) -> Number | None:
    """Return the value that all elements of an argument have; None if they differ or are unknown, or if it is empty."""
    if not isinstance(argument, Tensor):
        return argument
    values = known(argument)
    if values is None or not values.numel():
        return None
    with unset_fake_temporarily():
        first = values[(0,) * values.dim()]
        is_one = not any(values.stride()) or bool((values == first).all())
        return first.item() if is_one else None


def _compared(
    rule: Callable[[Number, Number], bool], one: Any, other: Any, known: Callable[[Tensor], Tensor | None]
) -> bool | None:
    """Compare a tensor with itself, or a finite number with one that is not."""
    if one is other:
        return rule(0, 0)
    limit = _limit(other, known)
    if limit is not None:
        return rule(0, limit)
    limit = _limit(one, known)
    return None if limit is None else rule(limit, 0)


def _limit(argument: Any, known: Callable[[Tensor], Tensor | None]) -> float | None:
    """Return an argument's value if it is an infinity or NaN."""
    if isinstance(argument, Tensor) and (argument.dim() or not argument.is_floating_point()):
        return None
    value = _of_all(argument, known)
    return value if isinstance(value, float) and not math.isfinite(value) else None


def _joined(is_or: bool, values: list[Number | None]) -> bool | None:
    """Apply "or" (or "and"): True or anything is True, False and anything is False; else both have to be known."""
    if any(value is not None and bool(value) == is_or for value in values):
        return is_or
    return None if not all(isinstance(value, bool) for value in values) else not is_or
