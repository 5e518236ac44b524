"""A Triton kernel with numbers that stay the same, launched by its compiled kernel from the second time on.

Triton examines each argument of each launch, to find the variant that was compiled for such arguments. Here types and
numbers are the same each time, so that only addresses can ask for another one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

logger = logging.getLogger(__name__)

_ALIGNMENT = 16
"""Alignment in bytes of the addresses that Triton compiles a variant for."""


class PreparedLaunch:
    """A launch whose tensors change, neither in type nor in device, and numbers that no variant is compiled for.

    Args:
        kernel: the kernel of Triton's.
        options: by name, what it takes after the arguments of :meth:`run`, and how it is compiled.
        seen: what Triton is to see of an argument, if not the argument: the compiled kernel takes addresses alone.
    """

    def __init__(
        self, kernel: Any, options: Mapping[str, Any], seen: Callable[[Any], Any] | None = None
    ) -> None:
        self._kernel, self._options, self._seen = kernel, options, seen
        self._values: tuple[Any, ...] = ()
        self._compiled: Any = None

    def run(self, num_programs: int, aligned: Iterable[Tensor], *arguments: Any) -> None:
        """Launch it on the current device.

        Args:
            num_programs: the size of its grid.
            aligned: those of the tensors whose memory may begin anywhere; others are new, which begins well.
            arguments: the kernel's arguments in front of the constants.
        """
        addresses = 0
        for tensor in aligned:
            addresses |= tensor.data_ptr()
        is_aligned = addresses % _ALIGNMENT == 0
        if is_aligned and self._compiled is not None:
            self._compiled[num_programs, 1, 1](*arguments, *self._values)
            return
        if self._seen is not None:
            arguments = tuple(map(self._seen, arguments))
        compiled = self._kernel[(num_programs,)](*arguments, **self._options)
        if compiled is None:  # traced or interpreted
            return
        if not hasattr(compiled, "__getitem__"):
            _say_that_none_came()
        elif is_aligned and not getattr(self._kernel, "pre_run_hooks", ()):
            names = [name for name in self._kernel.arg_names if name in self._options]
            self._compiled, self._values = compiled, tuple(self._options[name] for name in names)


@functools.cache
def _say_that_none_came() -> None:
    logger.info(
        "Kernels: this version of Triton returns no compiled kernel from a launch, so that each takes the host longer."
    )
