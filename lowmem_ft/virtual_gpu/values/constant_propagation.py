"""Values that a trace really computes, in addition to its fake tensors: those that follow from data alone.

Programs look at their token ids, positions and masks, at the sizes of pictures and at their pixels: whether a batch is
padded, where packed documents begin, which picture is one. Such values come from the host, so the trace computes them
on the side, and also single numbers, such as an optimizer's step counter. An operator's result is known if all its
tensors are: integers and booleans are from their making on, floating-point numbers where they follow from known
tensors, and all that a data loader or an image processor computes (:func:`all_values`). What weights or random numbers
have touched is unknown, except for what ``finite_values.py`` derives for all numbers; ``questions.py`` answers programs
that read it none the less.

What a mixture's router picks is assumed (``routing.py``), and so what follows from it is known, however large.

A result whose *size* depends on unknown values has the largest size it could have, so memory is not underestimated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.virtual_gpu.calls.fake_results import tensors_in
from lowmem_ft.virtual_gpu.values.finite_values import uniform_value
from lowmem_ft.virtual_gpu.values.questions import asking_line
from lowmem_ft.virtual_gpu.values.routing import (
    MOST_ROUTED_ELEMENTS,
    Routing,
    follows_from_routing,
    marked,
    picked,
)

aten = torch.ops.aten

MOST_ELEMENTS = 2**21
"""Elements above which values are not computed, unless they are no more than the data that they follow from: masks of
tokens x tokens would cost more than the rest of the trace."""

_YES_OR_NO = (aten.equal.default, aten.allclose.default, aten.is_nonzero.default)
_BUFFERS = frozenset(
    {
        *(aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
        *(aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
        *(aten.new_empty_strided.default, aten.view.dtype),
    }
)
"""Operators whose floating-point results are memory to be written to, by numbers that are unknown."""

_TO_ONE = (aten.scatter.value, aten.scatter_.value)
_NAME = "_known_values"
_MASKS = (torch.bool, torch.uint8)
_NOT_COPIED = ("device", "pin_memory", "layout")


_loading = False


class _UnknownError(Exception):
    """The values of a tensor are not known."""


@contextlib.contextmanager
def all_values() -> Iterator[None]:
    """Compute all values in a block, as a run does on the host: it loads and prepares data."""
    global _loading
    before, _loading = _loading, True
    try:
        yield
    finally:
        _loading = before


def known_values(tensor: Tensor) -> Tensor | None:
    """Return the values of a tensor on the CPU, or None if the trace does not have them."""
    if not isinstance(tensor, FakeTensor):
        return tensor if tensor.device.type == "cpu" else None
    return getattr(tensor, _NAME, None)


def set_values(tensor: Tensor, values: Tensor | None) -> None:
    """Set the values of a fake tensor."""
    setattr(tensor, _NAME, values)


def compute_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Give an operator's result its values, if those of all its tensors are known.

    Args:
        func: the operator; it has run on the fake tensors already.
        args: its arguments.
        kwargs: its keyword arguments.
        result: what it returned; each tensor in it gets its values.
    """
    is_ones = func in _TO_ONE
    if (
        type(result) is FakeTensor
        and result.is_floating_point()
        and result.dim()
        and (is_ones or not _may_be_known(func, args))
    ):
        if is_ones or getattr(result, _NAME, None) is not None:
            set_values(result, _ones_at_picked(func, args, result))
        return  # as most results are
    is_routed = are_routed(args)
    made = _written(func, args) if result is None else _flat(result)
    results = [item for item in made if isinstance(item, FakeTensor)]
    if not results:
        return
    if not all(_is_kept(result, func, args, is_routed) for result in results):
        if results[0].dtype == torch.bool or results[0].is_floating_point():
            _set_if_uniform(func, args, results)
        return
    if any(isinstance(value, torch.UntypedStorage) for value in args):
        for tensor in results:  # in memory without values: its own would have no address
            set_values(tensor, None)
        return
    if args and type(args[0]) is FakeTensor and known_values(args[0]) is None:
        _set_if_uniform(func, args, results)
        return
    try:
        values = _run_on_values(func, args, kwargs)
    except _UnknownError:
        _set_if_uniform(func, args, results)
        return
    if result is None:
        return  # it has written to the values themselves
    computed = [value for value in _flat(values) if isinstance(value, Tensor)]
    for tensor, value in zip(results, computed, strict=True):
        set_values(tensor, marked(value) if is_routed else value)


def _may_be_known(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether floating-point numbers may follow from data alone, judging by an operator's first tensor."""
    if _loading:
        return True
    first = args[0] if args else None
    if not isinstance(first, Tensor):
        first = next(tensors_in(args), None)
    if first is None or known_values(first) is None:
        return False
    return func not in _BUFFERS and torch.Tag.nondeterministic_seeded not in func.tags


def route(scores: Tensor, result: Any, num_picked: int, dim: int, routing: Routing) -> None:
    """Give the result of a router's ``topk`` the indices that a routing picks.

    Args:
        scores: its argument.
        result: what it returned: values and indices.
        num_picked: number of indices along the axis.
        dim: the axis.
        routing: the routing to assume.
    """
    values, indices = result
    set_values(values, None)
    is_small = indices.numel() <= MOST_ELEMENTS
    set_values(indices, picked(scores, num_picked, dim, routing) if is_small else None)


def are_routed(args: Any) -> bool:
    """Return whether known values of some argument follow from a routing."""
    return any(follows_from_routing(getattr(item, _NAME, None)) for value in args for item in _flat(value))


def _ones_at_picked(func: Any, args: tuple[Any, ...], result: Tensor) -> Tensor | None:
    """Return a mask of the picked experts where a program scatters ones into zeros, as floating-point numbers."""
    if func not in _TO_ONE or not are_routed(args) or args[3] != 1 or result.numel() > MOST_ROUTED_ELEMENTS:
        return None
    indices = known_values(args[2])
    assert indices is not None
    with unset_fake_temporarily():
        return marked(torch.zeros(result.shape, dtype=result.dtype).scatter(args[1], indices, 1))


def _set_if_uniform(func: Any, args: tuple[Any, ...], results: list[FakeTensor]) -> None:
    """Set the results to one value for all elements, or to unknown, as after an in-place operator."""
    is_one = len(results) == 1 and not results[0].is_floating_point()
    value = uniform_value(func, args, results[0], known_values) if is_one else None
    for tensor in results:
        set_values(tensor, None if value is None else _filled(tensor, value))


def _filled(tensor: FakeTensor, value: bool | int | float) -> Tensor:
    """Return a tensor of one value; a large one uses the memory of one element."""
    with unset_fake_temporarily():
        if tensor.numel() <= MOST_ELEMENTS:
            return torch.full(tensor.shape, value, dtype=tensor.dtype)
        return torch.full((), value, dtype=tensor.dtype).expand(tensor.shape)


def _written(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """Return the tensors that an operator without a result writes to, such as those of ``_foreach_add_``."""
    arguments = zip(func._schema.arguments, args, strict=False)
    return [
        item
        for argument, value in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for item in _flat(value)
    ]


def _is_kept(tensor: Tensor, func: Any, args: tuple[Any, ...], is_routed: bool) -> bool:
    if tensor.is_complex():
        return tensor.dim() == 0
    if tensor.is_floating_point() and tensor.dim() and (is_routed or not _may_be_known(func, args)):
        return False
    if _loading or tensor.numel() <= (MOST_ROUTED_ELEMENTS if is_routed else MOST_ELEMENTS):
        return True
    return any(
        tensor.numel() <= known.numel() for known in map(known_values, tensors_in(args)) if known is not None
    )


def _run_on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an operator's result for the known values of its arguments; raise if one is unknown."""
    kwargs = {name: value for name, value in kwargs.items() if name not in _NOT_COPIED}
    generator = kwargs.get("generator")
    if isinstance(generator, torch.Generator) and generator.device.type != "cpu":
        kwargs["generator"] = torch.Generator()  # of no use here, but the operator takes one
    real_args, real_kwargs = _known_or_raise(args), _known_or_raise(kwargs)
    with unset_fake_temporarily():
        if (
            func is aten.histc.default and not real_args[0].is_floating_point()
        ):  # which CUDA counts, and a CPU refuses
            counts = func(real_args[0].double(), *real_args[1:], **real_kwargs)
            return counts.to(real_args[0].dtype)
        return func(*real_args, **real_kwargs)


def read_value(func: Any, tensor: Tensor) -> float | int | bool | None:
    """Return the answer of ``tensor.item()``, or None if it is unknown."""
    values = known_values(tensor)
    if values is None:
        return None
    with unset_fake_temporarily():
        return func(values)


def read_values(tensor: Tensor, instead: float | int | bool) -> Tensor:
    """Return a real tensor for ``tensor.numpy()``: the values if they are known, else ``instead``."""
    values = known_values(tensor)
    with unset_fake_temporarily():
        return torch.full(tensor.shape, instead, dtype=tensor.dtype) if values is None else values


def result_of_unknown_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Return the result of an operator whose size depends on values, and whether that size is known.

    Raises:
        ModelError: if it is unknown and the operator has no rule here.
    """
    try:
        values = _run_on_values(func, args, kwargs)
    except _UnknownError:
        is_known = func is aten.linalg_lstsq.default or (
            func is aten.index.Tensor and _are_masks_known(args[1])
        )
        return _largest_result(func, args, kwargs), is_known
    template = args[0]
    return tree_map(lambda value: template.new_empty(value.shape, dtype=value.dtype), values), True


def answer_from_values(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> float | int | bool | None:
    """Return an operator's answer to the program itself, such as ``torch.equal``; None if yes or no is unknown.

    Raises:
        ModelError: if its answer is neither yes nor no and depends on unknown values.
    """
    try:
        return _run_on_values(func, args, kwargs)
    except _UnknownError:
        if func in _YES_OR_NO:
            return None
        raise depends_on_values(str(func)) from error


def depends_on_values(call: str) -> ModelError:
    """Return the error for a call by the program whose result depends on unknown values."""
    return ModelError(
        f"The program calls {call}, whose result depends on values that a trace does not have, at {asking_line()}. "
        "Rewrite that part with operators of fixed shape (masks in place of boolean indexing, scatter in place of "
        "loops over what was found), or leave it out while tracing."
    )


def _known_or_raise(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_known_or_raise, value))
    if isinstance(value, dict):
        return {name: _known_or_raise(item) for name, item in value.items()}
    if not isinstance(value, Tensor):
        return value
    known = known_values(value)
    if known is None or (
        known.numel() > MOST_ELEMENTS and not any(known.stride())
    ):  # one value for all elements
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
    """Index by a boolean mask: every element that the mask covers, or as many as it is known to pick."""
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


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: list[int], target_lengths: list[int], *args: Any
) -> Any:
    """Return the losses and the probabilities of all prefixes; see aten/src/ATen/native/cuda/LossCTC.cu."""
    batch = log_probs.shape[1]
    return log_probs.new_empty((batch,)), log_probs.new_empty(
        (batch, log_probs.shape[0], 2 * max(target_lengths) + 1)
    )


def _pack(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Pack rows of known lengths, or of the longest; torch's C++ reads the batch sizes, so they are a real tensor."""
    rows, most = padded.shape[:2] if batch_first else (padded.shape[1], padded.shape[0])
    known = known_values(lengths)
    with unset_fake_temporarily():
        each = torch.full((rows,), most) if known is None else known
        sizes = (each[:, None] > torch.arange(int(each.max()))).sum(0)
        total = int(sizes.sum())
    return padded.new_empty((total, *padded.shape[2:])), sizes


def _least_squares(
    matrix: Tensor, values: Tensor, rcond: Any = None, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a solution by QR, the only driver of CUDA; see aten/src/ATen/native/BatchLinearAlgebra.cpp."""
    is_vector = values.dim() == 1 or values.shape == matrix.shape[:-1]
    columns = () if is_vector else values.shape[-1:]
    batch = torch.broadcast_shapes(matrix.shape[:-2], values.shape[: -1 if is_vector else -2])
    has_residuals = matrix.shape[-2] > matrix.shape[-1]
    residuals = values.new_empty((*batch, *(columns or (1,))) if has_residuals else (0,))
    solution = values.new_empty((*batch, matrix.shape[-1], *columns))
    return solution, residuals, values.new_empty((0,), dtype=torch.int64), values.new_empty((0,))


_LARGEST: dict[Any, Any] = {
    aten.linalg_lstsq.default: _least_squares,
    aten._ctc_loss.default: _ctc_loss,
    aten._pack_padded_sequence.default: _pack,
    aten._unique2.default: _unique,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
}
