"""Sizes of products, attention and convolutions, on which their share of a GPU's peak depends."""

from __future__ import annotations

from typing import Any

from lowmem_ft.virtual_gpu.costs.flops import ATTENTION, PRODUCTS, lengths_of_attention

_CONVOLUTIONS = {"aten::convolution": 1, "aten::convolution_backward": 2}
"""Position of the weight."""


def shape_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, flops: int
) -> tuple[int, ...]:
    """Return the sizes of one call of an operator.

    Args:
        func: the operator, as a dispatch mode sees it.
        args: its arguments.
        kwargs: its keyword arguments.
        result: what it returned.
        flops: its operations.

    Returns:
        Of products: their number, and the rows, columns and inner dimension of one. Of attention: sequences times
        heads, queries of a sequence, keys that a query is multiplied with, in the mean, and the size of a head. Of a
        convolution: groups, and channels that a group reads and writes. Of other operators: nothing.
    """
    name = func._schema.name
    if name in PRODUCTS:
        return _of_product(name, args, result, flops)
    if name in ATTENTION:
        names = (argument.name for argument in func._schema.arguments)
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        products, token_dim = ATTENTION[name]
        queries, _ = lengths_of_attention(call, token_dim)
        elements, head_dim = call["query"].numel(), call["query"].shape[-1]
        return (
            -(-elements // (queries * head_dim or 1)),
            queries,
            flops // (2 * products * elements or 1),
            head_dim,
        )
    if name in _CONVOLUTIONS:
        weight, groups = args[_CONVOLUTIONS[name]], args[-2 if name.endswith("backward") else -1]
        return groups, weight.shape[1], weight.shape[0] // groups
    return ()


def _of_product(name: str, args: tuple[Any, ...], result: Any, flops: int) -> tuple[int, ...]:
    """Return the number of products, and the rows, columns and inner dimension of one."""
    if "grouped" in name:
        groups = args[1].shape[0] if args[1].dim() == 3 else result.shape[0]
        rows = -(-result.numel() // (groups * result.shape[-1] or 1))
        return groups, rows, result.shape[-1], flops // (2 * result.numel() or 1)
    inner = flops // (2 * result.numel() or 1)
    rows, columns = (1, 1, *result.shape)[-2:]
    return result.numel() // (rows * columns or 1), rows, columns, inner
