"""The global norm of gradients in float32, and clipping to it.

torch's own ``clip_grad_norm_`` computes the norm of 16-bit gradients in 16 bits; in bfloat16 that leaves three digits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_ft.foundation.tensors.local_shards import is_sharded, local_part, sum_over_shards

_ELEMENTS_AT_ONCE = 2**22
"""Elements converted to float32 together: a CPU copies all that it converts."""


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients down so that their global norm is at most ``max_norm``.

    Equals: ``torch.nn.utils.clip_grad_norm_`` for 32-bit gradients; for others the same in float32, each gradient
    rounded once. For gradients that FSDP2 has sharded, each process counts its own rows, and all get the same norm.

    Args:
        parameters: those without a gradient are skipped.
        max_norm: the limit; infinity only measures.

    Returns:
        The norm before clipping; 0-d, float32.
    """
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    sharded = [gradient for gradient in gradients if is_sharded(gradient)]
    if not sharded and all(gradient.dtype.itemsize >= 4 for gradient in gradients):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    norms = [norm_in_float32(gradient) for gradient in gradients if not is_sharded(gradient)]
    norm = torch.linalg.vector_norm(torch.stack([*norms, *_norms_over_processes(sharded)]))
    factor_1 = clip_factor(norm, max_norm).reshape(1)  # CUDA rounds a 0-d factor to the gradient's type
    for gradient in gradients:
        for part in _parts(local_part(gradient)):
            part.mul_(factor_1)
    return norm


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor for gradients, as in ``torch.nn.utils.clip_grads_with_norm_``, without a host sync."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def norm_in_float32(gradient: Tensor) -> Tensor:
    """Return the Euclidean norm of one gradient; 0-d, float32 (float64 for float64)."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(part, dtype=dtype) for part in _parts(gradient)])
    )


def _norms_over_processes(gradients: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the norm of all sharded gradients of each mesh, with one all-reduce per mesh."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        sharded: Any = gradient
        by_mesh.setdefault((sharded.device_mesh, tuple(sharded.placements)), []).append(gradient)
    for together in by_mesh.values():
        squares = torch.stack([norm_in_float32(local_part(gradient)) for gradient in together]).square().sum()
        yield sum_over_shards(squares, together[0]).sqrt()


def _parts(gradient: Tensor) -> tuple[Tensor, ...]:
    gradient = gradient.detach()
    return gradient.view(-1).split(_ELEMENTS_AT_ONCE) if gradient.is_contiguous() else (gradient,)
