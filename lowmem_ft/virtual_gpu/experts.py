"""Mixture-of-experts layers of transformers on the virtual GPU, computed as they would be on CUDA.

transformers multiplies all experts at once with ``grouped_mm`` unless told otherwise, and one after the other where the
GPU is older than Ampere. It asks ``device.type == "cuda"``, which the virtual device is not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers.integrations import moe

from lowmem_ft.devices import compute_capability, is_virtual

_AMPERE = (8, 0)


@contextlib.contextmanager
def experts_as_on_cuda() -> Iterator[None]:
    """Let transformers choose between its ways to multiply experts as it does on CUDA, while a block runs."""
    original = moe._can_use_grouped_mm

    @functools.wraps(original)
    def can_use_grouped_mm(input: Tensor, weight: Tensor, offs: Tensor) -> bool:
        if not is_virtual(weight.device):
            return original(input, weight, offs)
        # torch's own grouped_mm takes other types than bfloat16 on CUDA, one expert after the other and into one
        # output as transformers' fallback does; its rule for fake tensors does not.
        return weight.dtype == torch.bfloat16 and compute_capability(weight.device) >= _AMPERE

    moe._can_use_grouped_mm = can_use_grouped_mm
    try:
        yield
    finally:
        moe._can_use_grouped_mm = original
