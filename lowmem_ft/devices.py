"""What a device is, asked of torch's own module for it, so that a virtual GPU answers as a real one would."""

from __future__ import annotations

import torch


def kernels_of(device: torch.device | str) -> str:
    """The device type whose kernels a device runs: its own, or ``cuda`` for a virtual GPU that stands for one."""
    device = torch.device(device)
    if device.type in ("cpu", "meta"):
        return device.type
    return getattr(torch.get_device_module(device), "stands_for", device.type)


def is_virtual(device: torch.device | str) -> bool:
    """Whether a device stands for one that this machine does not have."""
    return kernels_of(device) != torch.device(device).type


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device or of a virtual one, such as (8, 0)."""
    return torch.get_device_module(device).get_device_capability(device)


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device computes with bfloat16 in hardware."""
    if kernels_of(device) != "cuda":
        return True
    module = torch.get_device_module(device)
    with module.device(device):
        return module.is_bf16_supported(including_emulation=False)


def name_of(device: torch.device) -> str:
    """The name people know a device by."""
    if kernels_of(device) != "cuda":
        return str(device)
    return torch.get_device_module(device).get_device_name(device)
