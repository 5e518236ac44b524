"""Parameters as flat tensors, cut into chunks; of sharded ones, what lies in this process."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from lowmem_ft.tensors.local_shards import local_part


def flat_weight(parameter: nn.Parameter) -> Tensor:
    """A parameter in one dimension: a view, or a copy if it is not contiguous; see :func:`write_back`."""
    return local_part(parameter).detach().contiguous().view(-1)


def write_back(weight: Tensor, parameter: nn.Parameter) -> None:
    """Bring changes of a :func:`flat_weight` into the parameter, if that was a copy."""
    here = local_part(parameter)
    if not here.is_contiguous():
        here.detach().copy_(weight.view(here.shape))


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
