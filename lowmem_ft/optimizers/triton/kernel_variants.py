"""A variant of the update's kernel: what it is compiled for, and its launch without another look at its arguments.

Triton examines each argument of each launch, to find the variant that was compiled for such arguments. Here rule,
formats and types tell it, together with the alignment of addresses: the first launch compiles the variant, the others
are the compiled kernel's own. The trial of the kernel (``chunked/triton_trial.py``) launches it both ways.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.foundation.tensors.triton_use import is_interpreted
from lowmem_ft.optimizers import triton as with_kernel  # its names import the library when they are used
from lowmem_ft.optimizers.formats.operators import BLOCK, SIGNED_OCTAVES, UNSIGNED_OCTAVES

logger = logging.getLogger(__name__)

VECTOR = 16
"""Chunks of a multiple of this many elements are read and written in vectors up to their end."""

_ALIGNMENT = 16
"""Alignment in bytes of the addresses that Triton compiles a variant for."""


class Variant:
    """A variant of the kernel; see :func:`variant_of`.

    Args:
        constants: its compile-time constants by name, in the kernel's order.
    """

    def __init__(self, constants: dict[str, Any]) -> None:
        self._constants = constants
        self._values = tuple(constants.values())
        self._tile = constants["ROWS"] * BLOCK
        self._compiled: Any = None

    def launch(self, tensors: Sequence[Tensor], num_elements: int, numbers: Sequence[float]) -> None:
        """Launch it on the current device.

        Args:
            tensors: the kernel's, in its order; any one in place of those that the variant does not use.
            num_elements: elements of the weight.
            numbers: the kernel's other numbers, in its order.
        """
        weight, beside, gradient, _, values_0, _, values_1, _ = tensors
        addresses = weight.data_ptr() | beside.data_ptr() | gradient.data_ptr()
        is_aligned = (addresses | values_0.data_ptr() | values_1.data_ptr()) % _ALIGNMENT == 0
        grid = (-(-num_elements // self._tile), 1, 1)
        if is_aligned and self._compiled is not None:
            self._compiled[grid](*tensors, num_elements, *numbers, *self._values)
            return
        kernel: Any = with_kernel.update_chunk
        options = {**self._constants, **with_kernel.OPTIONS}
        compiled = kernel[grid](*map(_raw, tensors), num_elements, *numbers, **options)
        if is_aligned:
            self._keep(compiled)

    def _keep(self, compiled: Any) -> None:
        if hasattr(compiled, "__getitem__"):
            self._compiled = compiled
        elif not is_interpreted():
            _say_that_none_came()


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


@functools.cache
def _say_that_none_came() -> None:
    logger.warning(
        "This version of Triton returns no compiled kernel from a launch: each of an update's launches takes the host "
        "longer."
    )


def _raw(tensor: Tensor) -> Tensor:
    """Return bfloat16 as int16, which the kernel works on."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
