"""Is a tensor free of NaN and infinity? Asked in one pass, without a copy."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_CHECKED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
"""Types that ``aminmax`` takes; 8-bit floats have no infinity worth looking for."""


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite; integers are. Reads some GB a second and core: less than a disk takes."""
    if tensor.dtype not in _CHECKED or tensor.numel() == 0:
        return True
    smallest, largest = torch.aminmax(tensor.detach())  # either is NaN if one value is
    return bool(torch.isfinite(smallest) & torch.isfinite(largest))


def names_of_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of those tensors that hold NaN or infinity, in their order."""
    return [name for name, tensor in tensors if not is_finite(tensor)]


def some_of(names: list[str], limit: int = 3) -> str:
    """A few names for a message, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{', '.join(names[:limit])}{more}"
