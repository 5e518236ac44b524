"""The global norm of gradients in float32, and clipping to it.

torch's own ``clip_grad_norm_`` computes the norm of 16-bit gradients in 16 bits; in bfloat16 that leaves three digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_ft.foundation.devices import kernels_of
from lowmem_ft.foundation.tensors.local_shards import is_sharded, local_part, sum_over_shards

_ELEMENTS_AT_ONCE = 2**22
"""Elements that a CPU converts to float32 together: it copies all that it converts, which a GPU does not."""


@torch.no_grad()
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
    norm = grad_norm(parameters)
    if max_norm < math.inf:
        _scale((local_part(p.grad) for p in parameters if p.grad is not None), clip_factor(norm, max_norm))
    return norm


@torch.no_grad()
def grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the global norm that :func:`clip_grad_norm` limits; 0-d, float32."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    sharded = [gradient for gradient in gradients if is_sharded(gradient)]
    if not sharded and all(gradient.dtype.itemsize >= 4 for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    norms = _norms_in_float32(gradient for gradient in gradients if not is_sharded(gradient))
    return torch.linalg.vector_norm(torch.stack([*norms, *_norms_over_processes(sharded)]))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor for gradients, as in ``torch.nn.utils.clip_grads_with_norm_``, without a host sync."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def norm_in_float32(gradient: Tensor) -> Tensor:
    """Return the Euclidean norm of one gradient; 0-d, float32 (float64 for float64)."""
    norms = [torch.linalg.vector_norm(part, dtype=_wide(part.dtype)) for part in _parts(gradient)]
    return norms[0] if kernels_of(gradient.device) == "cuda" else torch.linalg.vector_norm(torch.stack(norms))


def _norms_in_float32(gradients: Iterable[Tensor]) -> list[Tensor]:
    """Return the norms of gradients: on a GPU a few launches compute all those of one type."""
    gradients = list(gradients)
    kinds = _by_kind(gradients)
    if any(kernels_of(device) != "cuda" for device, _ in kinds):
        return [norm_in_float32(gradient) for gradient in gradients]
    return [
        norm
        for (_, dtype), together in kinds.items()
        for norm in torch._foreach_norm(together, 2, dtype=_wide(dtype))
    ]


def _norms_over_processes(gradients: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the norm of all sharded gradients of each mesh, with one all-reduce per mesh."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        sharded: Any = gradient
        by_mesh.setdefault((sharded.device_mesh, tuple(sharded.placements)), []).append(gradient)
    for together in by_mesh.values():
        squares = torch.stack(_norms_in_float32(map(local_part, together))).square().sum()
        yield sum_over_shards(squares, together[0]).sqrt()


def _scale(gradients: Iterable[Tensor], factor: Tensor) -> None:
    for (device, dtype), together in _by_kind(gradients).items():
        factor = factor.to(device)
        if kernels_of(device) == "cuda" and dtype == factor.dtype:
            torch._foreach_mul_(together, factor)
            continue
        for gradient in together:
            for part in _parts(gradient):
                part.mul_(factor.reshape(1))  # CUDA rounds a 0-d factor to the gradient's type


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _by_kind(gradients: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return kinds


def _parts(gradient: Tensor) -> tuple[Tensor, ...]:
    if kernels_of(gradient.device) == "cuda" or not gradient.is_contiguous():
        return (gradient,)
    return gradient.view(-1).split(_ELEMENTS_AT_ONCE)
