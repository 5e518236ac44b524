"""Names of types and devices in torch's errors."""

from __future__ import annotations

import torch
from torch import Tensor

TYPE_NAMES = {
    torch.float64: "Double",
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.uint16: "UInt16",
    torch.uint32: "UInt32",
    torch.uint64: "UInt64",
    torch.bool: "Bool",
}
"""Names that differ; other types are named as in Python, with a capital."""


def name_of(dtype: torch.dtype) -> str:
    """Return a type's name, such as ``Float``."""
    return TYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.").capitalize()


def class_of(tensor: Tensor) -> str:
    """Return ``Tensor.type()``, such as ``torch.cuda.FloatTensor``; every device except the host is ``cuda``."""
    return f"torch.{'' if tensor.is_cpu else 'cuda.'}{name_of(tensor.dtype)}Tensor"


def device_of(tensor: Tensor) -> str:
    """Return the name of a tensor's device, such as ``cuda:0``."""
    return "cpu" if tensor.is_cpu else f"cuda:{tensor.device.index or 0}"
