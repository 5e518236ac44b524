"""Triton's launches without a GPU: the host does all that it does up to the driver, and nothing is computed."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction


@contextlib.contextmanager
def stubbed_launches() -> Iterator[None]:
    """Let Triton's kernels compute nothing within the block."""
    with (
        mock.patch.object(triton.runtime.driver, "_active", _Driver()),
        mock.patch.object(JITFunction, "_do_compile", _without_a_compiler),
    ):
        yield


class _Driver:
    """A GPU's driver, as far as Triton asks it in front of a launch."""

    utils = types.SimpleNamespace()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class _Kernel:
    """A compiled kernel that does nothing."""

    function = 0
    packed_metadata = None
    __getitem__ = CompiledKernel.__getitem__

    def _init_handles(self) -> None:
        pass

    def launch_metadata(self, *arguments: Any) -> None:
        return None

    def run(self, *arguments: Any) -> None:
        """Launch nothing."""


def _without_a_compiler(self: Any, key: Any, signature: Any, device: int, *others: Any) -> _Kernel:
    kernel = self.device_caches[device][0][key] = _Kernel()
    return kernel
