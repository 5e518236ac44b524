"""Facts about a device, read from torch's own module for it, so that a virtual GPU answers as a real one would."""

from __future__ import annotations

import torch

from lowmem_ft.foundation.errors import UserError


def refuse_other_makers(device: torch.device) -> None:
    """Refuse to train on a device that is neither a processor, an NVIDIA GPU nor a virtual one.

    Raises:
        UserError: names the device; so does a torch for AMD's GPUs, which calls them ``cuda``.
    """
    on_amd = device.type == "cuda" and torch.version.hip is not None
    if device.type in ("cpu", "meta") or is_virtual(device) or (device.type == "cuda" and not on_amd):
        return
    other = {"mps": "Apple's GPU", "xpu": "an Intel GPU", "hpu": "Intel's Gaudi"}.get(device.type, "")
    seen = "an AMD GPU (a torch for ROCm)" if on_amd else f"{other or 'another device'} ({device.type})"
    raise UserError(
        f"lowmem_ft trains on NVIDIA's GPUs and on processors, got {seen}, on which no technique of it has been tried. "
        "Set training.use_cpu=true to train on the processor."
    )


def with_index(device: torch.device | str) -> torch.device:
    """Return a device under the name its tensors give it: ``cuda`` becomes the current one, such as ``cuda:0``.

    The two compare unequal, and some torch functions accept only the one with an index.
    """
    device = torch.device(device)
    if device.index is not None or device.type in ("cpu", "meta"):
        return device
    module = torch.get_device_module(device)
    # Apple's module has no current_device: there is one device.
    return torch.device(device.type, module.current_device() if hasattr(module, "current_device") else 0)


def of_tensors(device: torch.device | str) -> torch.device:
    """Return a device as tensors made there name it: with its index, and a virtual GPU by its own name."""
    return torch.empty(0, device=device).device


def kernels_of(device: torch.device | str) -> str:
    """Return the device type whose kernels a device runs: its own, or ``cuda`` for a virtual GPU that simulates one."""
    device = torch.device(device)
    if device.type in ("cpu", "meta"):
        return device.type
    return getattr(torch.get_device_module(device), "stands_for", device.type)


def is_virtual(device: torch.device | str) -> bool:
    """Return whether a device simulates one this machine lacks, as ``cuda`` may inside a virtual GPU's block."""
    device = torch.device(device)
    return device.type not in ("cpu", "meta") and hasattr(torch.get_device_module(device), "stands_for")


def is_apart(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether a tensor is stored elsewhere and must be copied to be used on a device; never true on a CPU."""
    return tensor.device.type != device.type


def sent_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device, by an asynchronous copy: CUDA wants pinned memory, which torch keeps alive."""
    if tensor.device.type == "cpu" and kernels_of(device) == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory with values in it; those on ``meta`` and torch's fake tensors do not."""
    return tensor.untyped_storage().device.type != "meta"


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device or of a virtual one, such as (8, 0)."""
    return torch.get_device_module(device).get_device_capability(device)


def has_bfloat16(device: torch.device) -> bool:
    """Return whether a device computes with bfloat16 in hardware."""
    if kernels_of(device) != "cuda":
        return True
    module = torch.get_device_module(device)
    with module.device(device):
        return module.is_bf16_supported(including_emulation=False)


def name_of(device: torch.device) -> str:
    """Return the product name of a CUDA device; for others, torch's name."""
    if kernels_of(device) != "cuda":
        return str(device)
    return torch.get_device_module(device).get_device_name(device)
