"""Variants of the update's kernel, each launched without another look at its arguments.

Rule, formats and types tell what a variant is compiled for, together with the alignment of addresses: the first launch
compiles it, the others are the compiled kernel's own. The trial of the kernel (``chunked/triton_trial.py``) launches it
both ways.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.foundation.tensors.prepared_launch import PreparedLaunch
from lowmem_ft.optimizers import triton as with_kernel  # its names import the library when they are used
from lowmem_ft.optimizers.formats.operators import BLOCK, SIGNED_OCTAVES, UNSIGNED_OCTAVES

VECTOR = 16
"""Chunks of a multiple of this many elements are read and written in vectors up to their end."""


class Variant:
    """A variant of the kernel; see :func:`variant_of`.

    Args:
        constants: its compile-time constants by name.
    """

    def __init__(self, constants: dict[str, Any]) -> None:
        options = {**constants, **with_kernel.OPTIONS}
        self._tile = constants["ROWS"] * BLOCK
        self._prepared = PreparedLaunch(with_kernel.update_chunk, options, _raw)

    def launch(self, tensors: Sequence[Tensor], num_elements: int, numbers: Sequence[float]) -> None:
        """Launch it on the current device.

        Args:
            tensors: the kernel's, in its order; any one in place of those that the variant does not use.
            num_elements: elements of the weight.
            numbers: the kernel's other numbers, in its order.
        """
        weight, beside, gradient, _, values_0, _, values_1, _ = tensors
        aligned = weight, beside, gradient, values_0, values_1
        self._prepared.run(-(-num_elements // self._tile), aligned, *tensors, num_elements, *numbers)


@functools.cache
def variant_of(
    rule: str,
    from_end: tuple[bool, bool],
    master: str,
    states: tuple[str, ...],
    gradient: torch.dtype,
    device: torch.device,
    *,
    has_clip: bool,
    in_vectors: bool,
) -> Variant:
    """Return the kernel's variant, one for each combination of arguments.

    Args:
        rule: name of the rule's branch.
        from_end: for each of its interpolations, whether it goes half of the way or more.
        master: format of the master; ``weight``: the weight is float32 itself.
        states: formats of the averages.
        gradient: type of the gradient.
        device: the device: compiled kernels are loaded on one.
        has_clip: whether gradients are scaled.
        in_vectors: whether the number of elements is a multiple of ``VECTOR``.
    """
    constants = {
        "RULE": rule,
        "MASTER": master,
        "STATE_0": states[0] if states else "none",
        "STATE_1": states[1] if len(states) > 1 else "none",
        "IS_HALF_GRADIENT": gradient == torch.bfloat16,
        "HAS_CLIP": has_clip,
        "FROM_END_0": from_end[0],
        "FROM_END_1": from_end[1],
        "SIGNED_OCTAVES": SIGNED_OCTAVES,
        "UNSIGNED_OCTAVES": UNSIGNED_OCTAVES,
        "IN_VECTORS": in_vectors,
        "VECTOR": VECTOR,
        "ROWS": with_kernel.ROWS,
    }
    return Variant(constants)


def _raw(argument: Any) -> Any:
    """Return a tensor in bfloat16 as int16, which the kernel works on."""
    is_half = isinstance(argument, Tensor) and argument.dtype == torch.bfloat16
    return argument.view(torch.int16) if is_half else argument
