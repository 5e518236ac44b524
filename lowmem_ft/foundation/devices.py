"""What a device is, asked of torch's own module for it, so that a virtual GPU answers as a real one would."""

from __future__ import annotations

import torch


def with_index(device: torch.device | str) -> torch.device:
    """A device as its tensors name it: ``cuda`` is the current one, such as ``cuda:0``.

    The two are unequal, and some of torch's functions take only one that has its index.
    """
    device = torch.device(device)
    if device.index is not None or device.type in ("cpu", "meta"):
        return device
    module = torch.get_device_module(device)
    # Apple's module has no such question: there is one device.
    return torch.device(device.type, module.current_device() if hasattr(module, "current_device") else 0)


def of_tensors(device: torch.device | str) -> torch.device:
    """A device as tensors that are made there name it: with its index, and a virtual GPU by its own name."""
    return torch.empty(0, device=device).device


def kernels_of(device: torch.device | str) -> str:
    """The device type whose kernels a device runs: its own, or ``cuda`` for a virtual GPU that stands for one."""
    device = torch.device(device)
    if device.type in ("cpu", "meta"):
        return device.type
    return getattr(torch.get_device_module(device), "stands_for", device.type)


def is_virtual(device: torch.device | str) -> bool:
    """Whether a device stands for one that this machine does not have, as ``cuda`` may inside a virtual GPU's block."""
    device = torch.device(device)
    return device.type not in ("cpu", "meta") and hasattr(torch.get_device_module(device), "stands_for")


def is_apart(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor waits elsewhere and has to be copied to be used on a device; on a CPU nothing does."""
    return tensor.device.type != device.type


def sent_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device, by a copy that nobody waits for: CUDA wants pinned memory for it, which torch keeps."""
    if tensor.device.type == "cpu" and kernels_of(device) == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory with values in it, as those on ``meta`` and torch's fake ones have not."""
    return tensor.untyped_storage().device.type != "meta"


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
