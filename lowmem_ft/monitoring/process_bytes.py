"""Bytes that this process holds of a CUDA device in all: tensors, cache, context, and memory of other libraries."""

from __future__ import annotations

import os
from typing import Any

import torch


class ProcessBytes:
    """Reads the driver's count for this process.

    NVML (package nvidia-ml-py) counts by process, but by the host's process ids: in a container it does not know ours.
    Then the count is all that is used on the device, minus what others held when this object was made.

    Args:
        device: a CUDA device.
        held_by_others_bytes: bytes of it that other processes hold.
    """

    def __init__(self, device: torch.device, held_by_others_bytes: int = 0) -> None:
        self._device = device
        self._others = held_by_others_bytes
        self._nvml, self._handle = _nvml_and_handle(device)

    def read(self) -> tuple[int, str]:
        """Return bytes now, and the source of the number."""
        own = self._by_nvml()
        if own is not None:
            return own, "NVML, this process"
        free, total = torch.cuda.mem_get_info(self._device)
        if self._others:
            return total - free - self._others, "cudaMemGetInfo, less what others held at the beginning"
        return total - free, "cudaMemGetInfo, the whole device"

    def _by_nvml(self) -> int | None:
        """Return NVML's count; None if NVML does not know this process, or its part of a GPU."""
        if self._handle is None:
            return None
        try:
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError:
            return None
        return next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)


def _nvml_and_handle(device: torch.device) -> tuple[Any, Any]:
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None, None
    try:
        pynvml.nvmlInit()  # once per process: it counts its calls
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # its index may differ from torch's
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return pynvml, None
