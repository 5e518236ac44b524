"""Integers, booleans and single numbers that a trace really computes, beside its fake tensors.

Programs look at their token ids, positions and masks: whether a batch is padded, where packed documents begin, how many
labels there are. Such tensors are small and come from the host, so their values are computed on the side, and so are
single floating-point numbers, such as an optimizer's step counter. An operator's result is known if all its tensors
are. Everything else is unknown; if the program reads it none the less, it is 0.0, 1 or False, so that ``loss.item()``
prints and a loss scaler finds no overflow.

A result whose *size* depends on unknown values has the largest size it could have: memory is not underestimated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map

from lowmem_ft.errors import ModelError

aten = torch.ops.aten

MOST_ELEMENTS = 2**21
"""Above it values are not computed: masks of tokens x tokens would cost more than the rest of the trace."""

_NAME = "_known_values"
_MASKS = (torch.bool, torch.uint8)
_NOT_COPIED = ("device", "pin_memory", "layout")


class _UnknownError(Exception):
    """A tensor's values are not known."""


def known_values(tensor: Tensor) -> Tensor | None:
    """The values of a tensor on the CPU, or None if the trace does not have them."""
    if not isinstance(tensor, FakeTensor):
        return tensor if tensor.device.type == "cpu" else None
    return getattr(tensor, _NAME, None)


def set_values(tensor: Tensor, values: Tensor | None) -> None:
    """Say what a fake tensor holds."""
    setattr(tensor, _NAME, values)


def compute_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Give an operator's integer result its values, if those of all its tensors are known.

    Args:
        func: the operator; it has run on the fake tensors already.
        args: its arguments.
        kwargs: its keyword arguments.
        result: what it returned; each integer or boolean tensor in it gets its values.
    """
    made = _written(func, args) if result is None else _flat(result)
    results = [item for item in made if isinstance(item, FakeTensor)]
    if not results or not all(map(_is_kept, results)):
        return
    try:
        values = run_on_values(func, args, kwargs)
    except _UnknownError:
        for tensor in results:  # an in-place operator may have made them unknown
            set_values(tensor, None)
        return
    if result is None:
        return  # it has written to the values themselves
    for tensor, value in zip(results, _flat(values), strict=True):
        set_values(tensor, value)


def _written(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """The tensors that an operator without a result writes to, such as those of ``_foreach_add_``."""
    arguments = zip(func._schema.arguments, args, strict=False)
    return [
        item
        for argument, value in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for item in _flat(value)
    ]


def _is_kept(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.dim() == 0
    return tensor.numel() <= MOST_ELEMENTS


def run_on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator returns for the known values of its arguments; raises if one is unknown."""
    kwargs = {name: value for name, value in kwargs.items() if name not in _NOT_COPIED}
    generator = kwargs.get("generator")
    if isinstance(generator, torch.Generator) and generator.device.type != "cpu":
        kwargs["generator"] = torch.Generator()  # of no use here, but the operator asks for one
    real_args, real_kwargs = tree_map(_known_or_raise, (args, kwargs))
    with unset_fake_temporarily():
        return func(*real_args, **real_kwargs)


def read_value(func: Any, tensor: Tensor) -> float | int | bool:
    """What ``tensor.item()`` answers: its value if that is known, else 0.0, 1 or False by type."""
    values = known_values(tensor)
    if values is not None:
        with unset_fake_temporarily():
            return func(values)
    return unknown_value(tensor)


def read_values(tensor: Tensor) -> Tensor:
    """What ``tensor.numpy()`` answers, as a real tensor: its values if they are known, else all 0.0, 1 or False."""
    values = known_values(tensor)
    with unset_fake_temporarily():
        return (
            torch.full(tensor.shape, unknown_value(tensor), dtype=tensor.dtype) if values is None else values
        )


def unknown_value(tensor: Tensor) -> float | int | bool:
    """What stands for a value that is not known, by type."""
    if tensor.dtype == torch.bool:
        return False
    return 0.0 if tensor.is_floating_point() else 1


def result_of_unknown_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """The result of an operator whose output's size depends on values, and whether that size is known.

    Raises:
        ModelError: if it is unknown and the operator has no rule here.
    """
    try:
        values = run_on_values(func, args, kwargs)
    except _UnknownError:
        return _largest_result(func, args, kwargs), func is aten.index.Tensor and _are_masks_known(args[1])
    template = args[0]
    return tree_map(lambda value: template.new_empty(value.shape, dtype=value.dtype), values), True


def answer_of_unknown_value(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> Any:
    """What an operator answers to the program itself, such as ``torch.equal``.

    Raises:
        ModelError: if the values are unknown.
    """
    try:
        return run_on_values(func, args, kwargs)
    except _UnknownError:
        raise depends_on_values(str(func)) from error


def depends_on_values(call: str) -> ModelError:
    """The error for a call that a program makes, and whose result nobody can know."""
    return ModelError(
        f"The program calls {call}, whose result depends on values that a trace does not have. Rewrite that part with "
        "operators of fixed shape (masks in place of boolean indexing, scatter in place of loops over what was found), "
        "or leave it out while tracing."
    )


def _known_or_raise(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    known = known_values(value)
    if known is None:
        raise _UnknownError
    return known


def _flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _largest_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rule = _LARGEST.get(func)
    if rule is None:
        raise depends_on_values(str(func))
    return rule(*args, **kwargs)


def _nonzero(tensor: Tensor) -> Tensor:
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


def _masked_select(tensor: Tensor, mask: Tensor) -> Tensor:
    return tensor.new_empty(torch.broadcast_shapes(tensor.shape, mask.shape)).flatten()


def _index(tensor: Tensor, indices: list[Tensor | None]) -> Tensor:
    """By a boolean mask: every element that the mask covers, or as many as it is known to pick."""
    numbers: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            numbers.append(index)
            continue
        known = known_values(index)
        with unset_fake_temporarily():
            count = index.numel() if known is None else int(known.count_nonzero())
        numbers += [index.new_empty((count,), dtype=torch.int64) for _ in range(index.dim())]
    return aten.index.Tensor(tensor, numbers)


def _are_masks_known(indices: list[Tensor | None]) -> bool:
    masks = [index for index in indices if index is not None and index.dtype in _MASKS]
    return all(known_values(mask) is not None for mask in masks)


def _unique(
    tensor: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    inverse = tensor.new_empty(tensor.shape if return_inverse else (0,), dtype=torch.int64)
    counts = tensor.new_empty((tensor.numel() if return_counts else 0,), dtype=torch.int64)
    return torch.empty_like(tensor).flatten(), inverse, counts


_LARGEST: dict[Any, Any] = {
    aten._unique2.default: _unique,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
}
