"""Registration of the device ``vgpu`` with torch, and of its kernels that replace CUDA's."""

from __future__ import annotations

import functools

from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from lowmem_ft.foundation.virtual_device import DEVICE_TYPE
from lowmem_ft.virtual_gpu.device.device import VirtualBackend
from lowmem_ft.virtual_gpu.device.guard import VirtualDeviceGuard
from lowmem_ft.virtual_gpu.kernels.attention_kernel import register_attention
from lowmem_ft.virtual_gpu.kernels.autocast import register_autocast
from lowmem_ft.virtual_gpu.kernels.fake_rules import register_fake_rules


@functools.cache
def register_virtual_device() -> VirtualBackend:
    """Register ``torch.device("vgpu")`` in this process, once, and return its module, which is ``torch.vgpu``."""
    backend = VirtualBackend()
    _setup_privateuseone_for_python_backend(
        DEVICE_TYPE, backend_module=backend, device_guard=VirtualDeviceGuard()
    )
    # These need the device, and hold for the process as torch's own kernels do.
    register_fake_rules()
    register_attention()
    register_autocast()
    return backend
