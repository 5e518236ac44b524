"""The budget as an allocator limit before training and as a comparison after it."""

from __future__ import annotations

import logging

import torch

from lowmem_ft.budget import Budget
from lowmem_ft.errors import UserError
from lowmem_ft.memory.meter import MemoryReading
from lowmem_ft.units import format_bytes, parse_bytes

logger = logging.getLogger(__name__)


def apply_budget(budget: Budget, device: torch.device) -> None:
    """Cap torch's caching allocator at ``budget.device``, so that a run above it fails here as it would on that card.

    Limits: memory outside the allocator (CUDA context, NCCL) is not capped; a CPU has no allocator to cap, so there the
    budget is only compared at the end.

    Raises:
        UserError: if the device has less memory than the budget.
    """
    if budget.device is None or device.type != "cuda":
        return
    num_bytes, total = parse_bytes(budget.device), torch.cuda.get_device_properties(device).total_memory
    if num_bytes > total:
        raise UserError(
            f"budget.device={budget.device} is more than this device has ({format_bytes(total)}). "
            "Lower it, or leave it out."
        )
    if budget.enforce:
        torch.cuda.set_per_process_memory_fraction(num_bytes / total, device)
        logger.info("The allocator is capped at budget.device=%s.", budget.device)


def report_budget(budget: Budget, device: MemoryReading, host: MemoryReading) -> None:
    """Log the measured peaks beside the budget; on a CPU both are the process's resident memory."""
    for name, limit, reading in (("device", budget.device, device), ("host", budget.host, host)):
        peak = format_bytes(reading.peak_bytes)
        if limit is None:
            logger.info("Peak %s memory: %s.", name, peak)
        elif reading.peak_bytes > parse_bytes(limit):
            logger.warning("Peak %s memory: %s, above budget.%s=%s.", name, peak, name, limit)
        else:
            logger.info("Peak %s memory: %s, within budget.%s=%s.", name, peak, name, limit)
