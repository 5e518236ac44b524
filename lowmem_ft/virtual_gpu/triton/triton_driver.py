"""Triton's driver for the virtual GPU: what libraries ask of the device before they launch a kernel."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.virtual_gpu.calls.active import active_gpu

_SHARED_KIB = {
    (7, 5): 64,
    (8, 0): 163,
    (8, 6): 99,
    (8, 7): 163,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (10, 3): 227,
}
"""Shared memory a block may have, by compute capability. Source: CUDA C++ Programming Guide 13.0, table 30."""
_SHARED_KIB_ELSEWHERE = 99

_REGISTERS = 65_536
_FLUSHED_BYTES = 256 * 2**20
"""Buffer that Triton writes between timings. Source: Triton 3.7, ``backends/nvidia/driver.py``."""


class VirtualDriver:
    """Stands for ``triton.runtime.driver.active``.

    Args:
        target: makes Triton's description of a GPU of a backend, an architecture and a warp size.
    """

    def __init__(self, target: Callable[[str, int, int], Any]) -> None:
        self._target = target
        self.utils = SimpleNamespace(get_device_properties=_properties)

    def get_current_target(self) -> Any:
        """Return the backend, the architecture and the size of a warp."""
        major, minor = active_gpu().spec.compute_capability
        return self._target("cuda", 10 * major + minor, 32)

    def get_active_torch_device(self) -> torch.device:
        """Return the device as programs name it."""
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        """Return ``torch.cuda``."""
        return torch.cuda

    def get_current_device(self) -> int:
        """Return its number."""
        return 0

    def set_current_device(self, device: int) -> None:
        """Accept the only one."""

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        """Return the compute capability."""
        return active_gpu().spec.compute_capability

    def get_current_stream(self, device: int = 0) -> int:
        """Return a handle of the current stream, which only this driver's kernels would read."""
        return active_gpu().recorder.stream

    def get_empty_cache_for_benchmark(self) -> Tensor:
        """Return the buffer that is written between two timings."""
        return _flushed()

    def clear_cache(self, cache: Tensor) -> None:
        """Write that buffer."""
        cache.zero_()

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Return what stands for a timing."""
        return benchmark


def benchmark(
    kernel: Callable[[], Any] | None = None, quantiles: tuple[float, ...] | None = None, **options: Any
) -> Any:
    """Take a timing's memory, and find the kernel as fast as any other."""
    _flushed()
    return 0.0 if quantiles is None else [0.0] * len(quantiles)


def _flushed() -> Tensor:
    return torch.empty(_FLUSHED_BYTES // 4, dtype=torch.int, device="cuda")


def _properties(device: int = 0) -> dict[str, int]:
    spec = active_gpu().spec
    return {
        "max_shared_mem": _SHARED_KIB.get(spec.compute_capability, _SHARED_KIB_ELSEWHERE) * 1024,
        "max_num_regs": _REGISTERS,
        "multiprocessor_count": spec.num_multiprocessors,
        "warpSize": 32,
    }
