"""Precision checks: whether a device supports a run's weight types and its mixed precision."""

from __future__ import annotations

import logging

import torch

from lowmem_ft.foundation.devices import has_bfloat16, name_of
from lowmem_ft.foundation.errors import raise_problems
from lowmem_ft.techniques.device_rules import precision_problems

logger = logging.getLogger(__name__)


def check_precision(
    dtype: str,
    mixed_precision: str,
    device: torch.device,
    *,
    frozen: bool = False,
    scales_loss: bool = True,
) -> None:
    """Reject weights and autocast that this device cannot compute with, or that would silently train wrongly.

    Args:
        dtype: ``model.dtype`` with ``auto`` resolved: ``float32``, ``bfloat16`` or ``float16``.
        mixed_precision: ``training.mixed_precision``: ``no``, ``bf16`` or ``fp16``.
        device: the device that the model trains on.
        frozen: whether these weights are frozen, next to adapters in float32.
        scales_loss: whether a loss scale would reach the gradients of trained weights.

    Raises:
        UserError: naming every rule that is broken.
    """
    raise_problems(
        precision_problems(
            dtype,
            mixed_precision,
            is_cpu=device.type == "cpu",
            has_bfloat16=has_bfloat16(device),
            device_name=name_of(device),
            frozen=frozen,
            scales_loss=scales_loss,
        )
    )
    if frozen and dtype == "bfloat16" and mixed_precision == "no":
        logger.info(
            "training.mixed_precision=no copies the input of each adapter to float32; with bf16 adapters compute in "
            "the weights' type, and no copy is kept"
        )
    if not frozen and dtype == "bfloat16" and mixed_precision == "bf16":
        logger.info(
            "training.mixed_precision=bf16 changes little with model.dtype=bfloat16: weights and matrix products are "
            "bfloat16 already; autocast only keeps some sums in float32"
        )
