"""Parameters as flat tensors, cut into chunks; for sharded ones, this process's part."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from lowmem_ft.foundation.tensors.local_shards import local_part


def flat_weight(parameter: nn.Parameter) -> Tensor:
    """Return a parameter in one dimension: a view, or a copy if it is not contiguous; see :func:`write_back`."""
    return local_part(parameter).detach().contiguous().view(-1)


def write_back(weight: Tensor, parameter: nn.Parameter) -> None:
    """Copy changes of a :func:`flat_weight` back into the parameter, if that was a copy."""
    here = local_part(parameter)
    if not here.is_contiguous():
        here.detach().copy_(weight.view(here.shape))


def spans(start: int, stop: int, size: int, unit: int = 1) -> Iterator[tuple[int, int]]:
    """Yield the first element and the one after the last of each chunk.

    Args:
        start: first element of all.
        stop: the one after the last of all.
        size: maximum number of elements of a chunk, but at least one unit.
        unit: chunk lengths are multiples of it.
    """
    length = max(size // unit, 1) * unit
    for first in range(start, stop, length):
        yield first, min(first + length, stop)
