"""Parameters as flat tensors, cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def flat_weight(parameter: nn.Parameter) -> Tensor:
    """A parameter in one dimension: a view, or a copy if it is not contiguous; see :func:`write_back`."""
    return parameter.detach().contiguous().view(-1)


def write_back(weight: Tensor, parameter: nn.Parameter) -> None:
    """Bring changes of a :func:`flat_weight` into the parameter, if that was a copy."""
    if not parameter.is_contiguous():
        parameter.detach().copy_(weight.view(parameter.shape))


def spans(start: int, stop: int, size: int, unit: int = 1) -> Iterator[tuple[int, int]]:
    """First element and the one after the last of each chunk.

    Args:
        start: first element of all.
        stop: the one after the last of all.
        size: elements of a chunk at most, but at least one unit.
        unit: chunks are a multiple of it long.
    """
    length = max(size // unit, 1) * unit
    for first in range(start, stop, length):
        yield first, min(first + length, stop)
