"""Launch of the Triton kernel: a chunk's tensors, its random keys, and the constants of its rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowmem_ft.foundation.tensors.own_operators import register_operator
from lowmem_ft.foundation.tensors.triton_use import launching_on
from lowmem_ft.optimizers import triton as with_kernel  # its names import the library when they are used
from lowmem_ft.optimizers.formats.master_formats import master_format
from lowmem_ft.optimizers.formats.operators import BLOCK, SIGNED_OCTAVES, UNSIGNED_OCTAVES
from lowmem_ft.optimizers.updates.adamw import AdamW
from lowmem_ft.optimizers.updates.lion import Lion
from lowmem_ft.optimizers.updates.sgd import SGD

VECTOR = 16
"""Chunks of a multiple of this many elements are read and written in vectors up to their end."""

_LARGEST_CHUNK = 2**31 - 1


@dataclass(frozen=True)
class RuleInKernel:
    """A rule in the form that the kernel takes.

    Args:
        name: name of its branch.
        constants: in the branch's order.
        from_end: for each of its interpolations, whether it goes half of the way or more.
    """

    name: str
    constants: tuple[float, ...]
    from_end: tuple[bool, bool] = (False, False)


def rule_in_kernel(rule: object, number: int, hyperparameters: Mapping[str, Any]) -> RuleInKernel | None:
    """Return the branch for a rule's step ``number``; None if the kernel has none, as for a derived class."""
    lr = hyperparameters["lr"]
    if type(rule) is AdamW:
        beta1, beta2 = hyperparameters["betas"]
        part = 1 - beta1
        constants = (
            1 - lr * hyperparameters["weight_decay"],
            part,
            _rest(part),
            beta2,
            1 - beta2,
            (1 - beta2**number) ** 0.5,
            hyperparameters["eps"],
            -(lr / (1 - beta1**number)),
        )
        return RuleInKernel("adamw", constants, (part >= 0.5, False))
    if type(rule) is Lion:
        of_step, of_momentum = hyperparameters["betas"]
        decay = 1 - lr * hyperparameters["weight_decay"]
        constants = (decay, of_step, _rest(of_step), of_momentum, _rest(of_momentum), lr)
        return RuleInKernel("lion", constants, (of_step >= 0.5, of_momentum >= 0.5))
    if type(rule) is SGD:
        return RuleInKernel("sgd", (hyperparameters["weight_decay"], hyperparameters["momentum"], -lr))
    return None


@dataclass(frozen=True)
class NamesInKernel:
    """The formats of a parameter, and the names of the tensors that keep it, as the kernel takes them.

    Args:
        master: format of the weight's float32 value; ``weight``: the weight is float32 itself.
        of_master: name of the master's tensor, if it has one.
        averages: names of the averages, at most two; the second has no sign.
        scales: names of the scales of those in 8 bits.
        states: formats of the averages.
        kept: all of these names.
    """

    master: str
    of_master: str | None
    averages: Sequence[str]
    scales: Sequence[str]
    states: list[str]
    kept: Sequence[str]


def names_in_kernel(master: str, dtype: torch.dtype, averages: Mapping[str, str]) -> NamesInKernel:
    """Return the names for a weight of a type, and for averages with their formats by name."""
    tensors = master_format(master, dtype).tensors
    scales = [f"{name}_scale" for name, state in averages.items() if state == "8bit"]
    return NamesInKernel(
        master="weight" if dtype == torch.float32 else master,
        of_master=next(iter(tensors), None),
        averages=list(averages),
        scales=scales,
        states=list(averages.values()),
        kept=[*tensors, *averages, *scales],
    )


def launch(
    rule: RuleInKernel,
    *,
    names: NamesInKernel,
    weight: Tensor,
    gradient: Tensor,
    clip: Tensor | None,
    kept: Mapping[str, Tensor],
    keys: list[int],
    element: int,
) -> None:
    """Update a chunk in place, on its device's current stream, without a host sync.

    Args:
        rule: the rule's step.
        names: the parameter's formats, and names in ``kept``.
        weight: contiguous, float32 or bfloat16.
        gradient: contiguous, float32, bfloat16 or float16.
        clip: factor on the gradient, 0-d float32 on the device; None means 1. If it is NaN, nothing changes.
        kept: stored tensors of master and averages, on the device.
        keys: keys of the random bits of master and averages.
        element: number of the chunk's first element.

    Raises:
        ValueError: if the chunk has 2**31 elements or more.
    """
    if weight.numel() > _LARGEST_CHUNK:
        raise ValueError(
            f"The kernel takes chunks of up to {_LARGEST_CHUNK} elements, got {weight.numel()}. "
            "Lower the optimizer's chunk_elements."
        )
    _update_in_triton(
        weight,
        None if names.of_master is None else kept[names.of_master],
        [kept[name] for name in names.averages],
        [kept[name] for name in names.scales],
        gradient,
        clip,
        names.master,
        names.states,
        rule.name,
        rule.constants,
        rule.from_end,
        keys,
        element,
    )


def update_in_triton(
    weight: Tensor,
    beside: Tensor | None,
    averages: list[Tensor],
    scales: list[Tensor],
    gradient: Tensor,
    clip: Tensor | None,
    master: str,
    states: list[str],
    rule: str,
    constants: list[float],
    from_end: list[bool],
    keys: list[int],
    element: int,
) -> None:
    """Launch the kernel, as an operator: a trace, without Triton and values, sees what it reads and writes."""
    # A dummy tensor fills each pointer that the compiled kernel does not use.
    values = [*averages, *[weight] * (2 - len(averages))]
    of_blocks = iter(scales)
    scales = [next(of_blocks) if state == "8bit" else weight for state in states]
    scales += [weight] * (2 - len(scales))
    num_elements = weight.numel()
    kernel: Any = with_kernel.update_chunk
    with launching_on(weight):
        kernel[(-(-num_elements // (with_kernel.ROWS * BLOCK)),)](
            _raw(weight),
            _raw(weight if beside is None else beside),
            _raw(gradient),
            weight if clip is None else clip,
            *(tensor for pair in zip(map(_raw, values), map(_raw, scales), strict=True) for tensor in pair),
            num_elements,
            element,
            *keys,
            *(*constants, *[0.0] * (8 - len(constants))),
            RULE=rule,
            MASTER=master,
            STATE_0=states[0] if states else "none",
            STATE_1=states[1] if len(states) > 1 else "none",
            IS_HALF_GRADIENT=gradient.dtype == torch.bfloat16,
            HAS_CLIP=clip is not None,
            FROM_END_0=from_end[0],
            FROM_END_1=from_end[1],
            SIGNED_OCTAVES=SIGNED_OCTAVES,
            UNSIGNED_OCTAVES=UNSIGNED_OCTAVES,
            IN_VECTORS=num_elements % VECTOR == 0,
            VECTOR=VECTOR,
            ROWS=with_kernel.ROWS,
            **with_kernel.OPTIONS,
        )


def _moved_bytes(
    weight: Tensor,
    beside: Tensor | None,
    averages: Sequence[Tensor],
    scales: Sequence[Tensor],
    gradient: Tensor,
    *others: object,
) -> int:
    """Return the bytes moved: weight and state are read and written once, the gradient is read once."""
    kept = [*averages, *scales, *([] if beside is None else [beside])]
    return 2 * sum(tensor.nbytes for tensor in (weight, *kept)) + gradient.nbytes


_update_in_triton = register_operator(
    update_in_triton,
    "(Tensor(a!) weight, Tensor(b!)? beside, Tensor(c!)[] averages, Tensor(d!)[] scales, Tensor gradient, "
    "Tensor? clip, str master, str[] states, str rule, float[] constants, bool[] from_end, int[] keys, int element) "
    "-> ()",
    lambda *arguments: None,
    moved_bytes=_moved_bytes,
    irrelevant=("constants", "keys", "element"),
    launched_by_triton=True,
)


def _rest(part: float) -> float:
    """Return 1 minus a share that torch has rounded to float32."""
    return 1 - float(np.float32(part))


def _raw(tensor: Tensor) -> Tensor:
    """Return bfloat16 as int16, which the kernel works on."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
