"""Mixture-of-experts layers of transformers on a tracing machine, computed as they would be on a real one.

transformers multiplies all experts at once with ``grouped_mm`` by default, and one after the other where the GPU is
older than Ampere. It checks ``device.type == "cuda"``, which the virtual device is not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor
from transformers.integrations import moe

from lowmem_ft.foundation.devices import compute_capability, is_virtual
from lowmem_ft.foundation.upstream.patches import wrap

_AMPERE = (8, 0)


def experts_as_if_real(undo: contextlib.ExitStack) -> None:
    """Let transformers choose among its ways to multiply experts as with real tensors until a stack is undone."""
    wrap(undo, moe, "_can_use_grouped_mm", _can_use_grouped_mm)


def _can_use_grouped_mm(
    can_use_grouped_mm: Callable[..., bool], inputs: Tensor, weight: Tensor, offs: Tensor
) -> bool:
    if is_virtual(weight.device):
        is_there = compute_capability(weight.device) >= _AMPERE
    else:
        is_there = can_use_grouped_mm(inputs, weight, offs)
    # For types other than bfloat16, torch's own grouped_mm computes one expert after the other, into one output, as
    # transformers' fallback does; its rule for fake tensors does not take them.
    return is_there and weight.dtype == torch.bfloat16
