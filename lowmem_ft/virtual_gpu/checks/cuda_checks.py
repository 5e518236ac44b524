"""Calls that CUDA refuses because of the devices and types of their tensors, or because of the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload

from lowmem_ft.virtual_gpu.calls.fake_results import tensors_in
from lowmem_ft.virtual_gpu.checks.device_mismatches import check_devices, check_generator
from lowmem_ft.virtual_gpu.checks.dtype_checks import Capability, check_dtypes
from lowmem_ft.virtual_gpu.kernels.index_writes import check_index_writes


@dataclass(frozen=True)
class CudaChecks:
    """The checks of one kind of GPU; calls that pass one pass all equal ones.

    Args:
        device_type: type of the virtual device.
        compute_capability: that of the GPU.
    """

    device_type: str
    compute_capability: Capability

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise as CUDA would.

        Raises:
            RuntimeError: in CUDA's words.
        """
        generator = kwargs.get("generator")
        if generator is not None:
            check_generator(generator, args, kwargs)
        devices = {tensor.device.type for tensor in tensors_in((args, kwargs))} - {"meta"}
        if self.device_type in devices and isinstance(func, OpOverload):
            if len(devices) > 1 and func.namespace == "aten":
                check_devices(func, args, kwargs)
            check_dtypes(func, args, kwargs, self.compute_capability)
            check_index_writes(func, args, kwargs)
