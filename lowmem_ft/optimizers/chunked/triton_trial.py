"""A small trial update with each kernel, before one of them is trusted with the model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowmem_ft.foundation.tensors.gradient_slice import GradientSlice
from lowmem_ft.foundation.tensors.triton_use import Kernel, Work, uses_kernel
from lowmem_ft.optimizers.formats.operators import BLOCK
from lowmem_ft.optimizers.triton.kernel_variants import VECTOR
from lowmem_ft.optimizers.triton.triton_update import Launches, rule_in_kernel

if TYPE_CHECKING:
    from lowmem_ft.optimizers.chunked.chunked_optimizer import ChunkedOptimizer

_UPDATE = Work("update", "Weights are updated by many small kernels")

_NUM_STEPS = 2

_LEARNING_RATE = 2.0**-6
"""Learning rate that changes weights of about 1 in every format; a warm-up's first one is 0, which changes none."""


def in_kernel(
    optimizer: ChunkedOptimizer,
    finished: GradientSlice,
    number: int,
    hyperparameters: Mapping[str, Any],
    scale: Tensor | None,
) -> Launches | None:
    """Return the launches of the Triton kernel for an update; None: it is made operation by operation.

    Of slices it depends on step number, hyperparameters, formats, types, device and :func:`has_tail` alone.

    Args:
        optimizer: the optimizer.
        finished: the slice.
        number: number of the parameter's step, from 1.
        hyperparameters: those of the update.
        scale: factor on the gradients; None: 1.
    """
    if optimizer.kernel == "eager":
        return None
    rule = rule_in_kernel(optimizer.rule, number, hyperparameters)
    if rule is None:
        return None
    dtype, gradient = finished.parameter.dtype, finished.gradient
    names, has_clip = optimizer.layout_of(finished.parameter).in_kernel, scale is not None
    formats = (rule.name, rule.from_end, optimizer.master_format, tuple(names.states))
    tail = has_tail(gradient)
    num_elements = 5 * BLOCK + 5 * VECTOR - (3 if tail else 0)
    trial = partial(_values_after, optimizer, dtype, gradient, hyperparameters, num_elements, has_clip)
    compiled_for = (*formats, dtype, gradient.dtype, tail, has_clip)
    if not uses_kernel(_UPDATE, optimizer.kernel, gradient.device, compiled_for, trial):
        return None
    return Launches(rule, names, scale, gradient)


def has_tail(gradient: Tensor) -> bool:
    """Return whether the last chunk does not end with a vector, which is a separate variant of the kernel."""
    return gradient.numel() % VECTOR != 0


def _values_after(
    optimizer: ChunkedOptimizer,
    dtype: torch.dtype,
    like: Tensor,
    hyperparameters: Mapping[str, Any],
    num_elements: int,
    has_clip: bool,
    kernel: Kernel,
) -> dict[str, Tensor]:
    """Return weight and averages of a small parameter after steps with an optimizer's rule and formats.

    Args:
        optimizer: the optimizer whose update is tried; it stays as it is.
        dtype: type of the weight.
        like: a gradient, for device and type.
        hyperparameters: those of the group.
        num_elements: elements of the parameter; two chunks.
        has_clip: whether gradients are scaled.
        kernel: the kernel to update with.
    """
    values = torch.randn(1 + _NUM_STEPS, num_elements, generator=torch.Generator().manual_seed(0))
    weight, *gradients = values.to(like.device)
    parameter = nn.Parameter(weight.to(dtype))
    twin = type(optimizer)(
        [{**hyperparameters, "lr": _LEARNING_RATE, "params": [parameter]}],
        optimizer.rule,
        optimizer.defaults,
        state=optimizer.state_format,
        master=optimizer.master_format,
    )
    twin.kernel = kernel
    twin.chunk_elements = 4 * BLOCK
    scale = torch.full((), 0.5, device=like.device) if has_clip else None
    for gradient in gradients:
        twin.update([GradientSlice(parameter, gradient.to(like.dtype))], scale=scale)
    state = twin.state[parameter]
    found = {
        name: form.read(state, name, parameter.numel()) for name, form in twin.averages_of(parameter).items()
    }
    return found | {"weight": twin.master_of(parameter).read(parameter.detach(), state)}
