"""A Triton kernel with numbers that stay the same, launched by its compiled kernel from the second time on.

Triton examines each argument of each launch, to find the variant that was compiled for such arguments. Here types and
numbers are the same each time, so that only addresses can ask for another one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

logger = logging.getLogger(__name__)

_ALIGNMENT = 16
"""Alignment in bytes of the addresses that Triton compiles a variant for."""


class PreparedLaunch:
    """A launch whose tensors alone change, and these neither in type nor in device.

    Args:
        kernel: the kernel of Triton's.
        grid: its numbers of programs.
        options: by name, what it takes after the arguments of :meth:`run`, and how it is compiled.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], options: Mapping[str, Any]) -> None:
        self._kernel, self._grid, self._options = kernel, grid, options
        self._values: tuple[Any, ...] = ()
        self._compiled: Any = None

    def run(self, aligned: Sequence[Tensor], *arguments: Any) -> None:
        """Launch it on the current device.

        Args:
            aligned: those of the tensors whose memory may begin anywhere; others are new, which begins well.
            arguments: the kernel's arguments in front of the constants; what is no tensor is the same each time.
        """
        if self._compiled is not None and _are_aligned(aligned):
            self._compiled[(*self._grid, 1, 1)](*arguments, *self._values)
            return
        compiled = self._kernel[self._grid](*arguments, **self._options)
        if compiled is None:  # traced or interpreted
            return
        if not hasattr(compiled, "__getitem__"):
            _say_that_none_came()
        elif _are_aligned(aligned) and not getattr(self._kernel, "pre_run_hooks", ()):
            names = [name for name in self._kernel.arg_names if name in self._options]
            self._compiled, self._values = compiled, tuple(self._options[name] for name in names)


def _are_aligned(tensors: Sequence[Tensor]) -> bool:
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    return addresses % _ALIGNMENT == 0


@functools.cache
def _say_that_none_came() -> None:
    logger.info(
        "Kernels: this version of Triton returns no compiled kernel from a launch, so that each takes the host longer."
    )
