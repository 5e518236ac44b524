"""Launch of the Triton kernel: a chunk's tensors, its random keys, and the constants of its rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lowmem_ft.foundation.tensors.own_operators import operators_are_seen, register_operator
from lowmem_ft.optimizers.formats.master_formats import master_format
from lowmem_ft.optimizers.triton.kernel_variants import VECTOR, Variant, variant_of
from lowmem_ft.optimizers.updates.adamw import AdamW
from lowmem_ft.optimizers.updates.lion import Lion
from lowmem_ft.optimizers.updates.sgd import SGD

T = TypeVar("T")

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
    """

    master: str
    of_master: str | None
    averages: Sequence[str]
    scales: Sequence[str]
    states: list[str]


def names_in_kernel(master: str, dtype: torch.dtype, averages: Mapping[str, str]) -> NamesInKernel:
    """Return the names for a weight of a type, and for averages with their formats by name."""
    return NamesInKernel(
        master="weight" if dtype == torch.float32 else master,
        of_master=next(iter(master_format(master, dtype).tensors), None),
        averages=list(averages),
        scales=[f"{name}_scale" for name, state in averages.items() if state == "8bit"],
        states=list(averages.values()),
    )


class Launches:
    """Launches of the kernel that differ only in tensors, keys and elements: what they share is decided once.

    Where nothing would see the operator ``update_in_triton``, as a trace does, its kernel is launched without it: an
    operator of so many arguments takes the host longer than all the rest.

    Args:
        rule: the rule's step.
        names: the parameters' formats, and names in ``kept``.
        clip: factor on the gradients, 0-d float32 on the device; None means 1. If it is NaN, nothing changes.
        gradient: one of the gradients: all have its type and device.

    Attributes:
        kept: the names of all stored tensors.
    """

    def __init__(
        self, rule: RuleInKernel, names: NamesInKernel, clip: Tensor | None, gradient: Tensor
    ) -> None:
        self._rule, self._names, self._clip = rule, names, clip
        self._pointers = [names.of_master, *_in_pairs(names.averages, names.scales, names.states)]
        self._constants = _padded(rule.constants)
        self._variants = [
            _variant(
                rule.name, rule.from_end, names.master, names.states, gradient, clip, in_vectors=in_vectors
            )
            for in_vectors in (() if operators_are_seen(gradient) else (False, True))
        ]
        self.kept = [name for name in self._pointers if name is not None]

    def launch(
        self, weight: Tensor, gradient: Tensor, kept: Mapping[str, Tensor], keys: list[int], element: int
    ) -> None:
        """Update a chunk in place, on its device's current stream, without a host sync.

        Args:
            weight: contiguous, float32 or bfloat16; on the current device.
            gradient: contiguous, float32, bfloat16 or float16.
            kept: stored tensors of master and averages, on the device.
            keys: keys of the random bits of master and averages.
            element: number of the chunk's first element.

        Raises:
            ValueError: if the chunk has 2**31 elements or more.
        """
        num_elements = weight.numel()
        if num_elements > _LARGEST_CHUNK:
            raise ValueError(
                f"The kernel takes chunks of up to {_LARGEST_CHUNK} elements, got {num_elements}. "
                "Lower the optimizer's chunk_elements."
            )
        if self._variants:
            beside, *averages = [weight if name is None else kept[name] for name in self._pointers]
            clip = weight if self._clip is None else self._clip
            variant = self._variants[num_elements % VECTOR == 0]
            numbers = (element, *keys, *self._constants)
            variant.launch((weight, beside, gradient, clip, *averages), num_elements, numbers)
            return
        rule, names = self._rule, self._names
        _update_in_triton(
            weight,
            None if names.of_master is None else kept[names.of_master],
            [kept[name] for name in names.averages],
            [kept[name] for name in names.scales],
            gradient,
            self._clip,
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
    num_elements = weight.numel()
    in_vectors = num_elements % VECTOR == 0
    variant = _variant(rule, from_end, master, states, gradient, clip, in_vectors=in_vectors)
    tensors = [beside, gradient, clip, *_in_pairs(averages, scales, states)]
    in_order = [weight, *(weight if tensor is None else tensor for tensor in tensors)]
    variant.launch(in_order, num_elements, (element, *keys, *_padded(constants)))


def _variant(
    rule: str,
    from_end: Sequence[bool],
    master: str,
    states: Sequence[str],
    gradient: Tensor,
    clip: Tensor | None,
    *,
    in_vectors: bool,
) -> Variant:
    first, second = from_end
    return variant_of(
        rule,
        (first, second),
        master,
        tuple(states),
        gradient.dtype,
        gradient.device,
        has_clip=clip is not None,
        in_vectors=in_vectors,
    )


def _in_pairs(averages: Sequence[T], scales: Sequence[T], states: Sequence[str]) -> list[T | None]:
    """Return the first average, its scales, the second one and its scales; None: the formats have none."""
    of_blocks, places = iter(scales), list[T | None]()
    for average, state in zip(averages, states, strict=True):
        places += [average, next(of_blocks) if state == "8bit" else None]
    return places + [None] * (4 - len(places))


def _padded(constants: Sequence[float]) -> list[float]:
    return [*constants, *[0.0] * (8 - len(constants))]


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


# Launched by the compiled kernel it takes the host as long as an operator of torch (``bench update --python``).
_update_in_triton = register_operator(
    update_in_triton,
    "(Tensor(a!) weight, Tensor(b!)? beside, Tensor(c!)[] averages, Tensor(d!)[] scales, Tensor gradient, "
    "Tensor? clip, str master, str[] states, str rule, float[] constants, bool[] from_end, int[] keys, int element) "
    "-> ()",
    lambda *arguments: None,
    moved_bytes=_moved_bytes,
    irrelevant=("constants", "keys", "element"),
)


def _rest(part: float) -> float:
    """Return 1 minus a share that torch has rounded to float32."""
    return 1 - float(np.float32(part))
