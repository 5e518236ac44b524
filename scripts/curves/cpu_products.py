"""Matrix products of bfloat16 on a processor without units for them: in float32, rounded once.

That is what tensor cores compute: products of bfloat16 are exact in float32, and so are their sums up to rounding.
torch's own kernels for such processors take six to thirty times as long as float32's.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor


@contextlib.contextmanager
def float32_products() -> Iterator[None]:
    """Compute ``mm``, ``bmm`` and ``addmm_`` of bfloat16 on the CPU by float32's kernels, which stay as they are."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # of what is overridden here
        library.impl("mm", _mm, "CPU", allow_override=True)
        library.impl("bmm", _bmm, "CPU", allow_override=True)
        library.impl("addmm_", _addmm_, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _mm(left: Tensor, right: Tensor) -> Tensor:
    result = left.new_empty((left.shape[0], right.shape[1]), dtype=torch.float32)
    torch.mm(left.float(), right.float(), out=result)
    return result.to(left.dtype)


def _bmm(left: Tensor, right: Tensor) -> Tensor:
    result = left.new_empty((left.shape[0], left.shape[1], right.shape[2]), dtype=torch.float32)
    torch.bmm(left.float(), right.float(), out=result)
    return result.to(left.dtype)


def _addmm_(total: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    result = total.float()
    torch.addmm(result, left.float(), right.float(), beta=beta, alpha=alpha, out=result)
    return total.copy_(result)
