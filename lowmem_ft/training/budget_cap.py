"""The budget as an allocator limit before training and as a comparison after it."""

from __future__ import annotations

import logging

import torch

from lowmem_ft.budget import Budget, is_of_size
from lowmem_ft.errors import UserError
from lowmem_ft.memory.meter import read_device_memory, read_host_memory
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
    if not is_of_size(total, num_bytes):
        raise UserError(
            f"budget.device={budget.device} is more than this device has ({format_bytes(total)}). "
            "Lower it, or leave it out."
        )
    if budget.enforce:
        torch.cuda.empty_cache()  # what the process has cached before would be handed out beside the budget
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), device)
        logger.info("The allocator is capped at budget.device=%s.", budget.device)


def lift_cap(budget: Budget) -> None:
    """Undo :func:`apply_budget` on the current device: what else the process does has not asked for the cap."""
    if budget.device is not None and budget.enforce and torch.cuda.is_initialized():
        torch.cuda.set_per_process_memory_fraction(1.0)


def report_budget(budget: Budget, device: torch.device, *, file_bytes: int = 0) -> None:
    """Log the measured peaks beside the budget; on a CPU the device's memory is the host's.

    Args:
        budget: what was allowed.
        device: where it was trained.
        file_bytes: the most that files of ``offload.folder`` held. Their pages are among the host's resident ones while
            there is room, and count for no budget, as the system takes them back when there is none.
    """
    peaks = [("host", budget.host, read_host_memory().peak_bytes)]
    if device.type == "cuda" or budget.device is not None:
        peaks.insert(0, ("device", budget.device, read_device_memory(device).peak_bytes))
    for name, limit, peak_bytes in peaks:
        peak = format_bytes(peak_bytes)
        in_files = min(file_bytes, peak_bytes) if name == "host" or device.type == "cpu" else 0
        if in_files:
            peak += f" (up to {format_bytes(in_files)} of it pages of files in offload.folder)"
        if limit is None:
            logger.info("Peak %s memory: %s.", name, peak)
        elif peak_bytes - in_files > parse_bytes(limit):
            logger.warning("Peak %s memory: %s, above budget.%s=%s.", name, peak, name, limit)
        else:
            logger.info("Peak %s memory: %s, within budget.%s=%s.", name, peak, name, limit)
