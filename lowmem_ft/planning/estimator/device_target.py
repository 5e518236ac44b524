"""The device that an estimate is for: one from the catalogue, this machine's own, or one that a budget would buy."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import torch

from lowmem_ft.foundation.budget import Budget, is_of_size
from lowmem_ft.foundation.catalog.context_overhead import allocator_cap
from lowmem_ft.foundation.catalog.gpu_catalog import CPU, find_gpu, load_gpus
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.catalog.this_machine import this_machines_gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.memory_estimate import BudgetVerdict
from lowmem_ft.foundation.units import format_bytes, parse_bytes
from lowmem_ft.recipe.rules.budget_limits import beyond_all


def choose_gpu(gpu: str | Gpu | None, budget: Budget, *, use_cpu: bool) -> tuple[Gpu | None, str]:
    """Choose the GPU to estimate for, and say why.

    Args:
        gpu: a GPU, its name in the catalogue, ``cpu``, or None to choose.
        budget: where this machine has no GPU, its device part selects a GPU of that size.
        use_cpu: whether the recipe trains on the CPU anyway.

    Returns:
        The GPU, or None for this machine's processor; and the reason, empty if the caller named the device.

    Raises:
        UserError: if the catalogue has no such GPU.
    """
    if isinstance(gpu, Gpu):
        return gpu, ""
    if gpu == CPU:
        return None, ""
    if gpu is not None:
        return find_gpu(gpu), ""
    if use_cpu:
        return None, "device: this machine's processor (training.use_cpu=true)"
    if torch.cuda.is_available():
        own = this_machines_gpu()
        return own, f"device: this machine's {own.full_name}{own.note and '; '}{own.note}"
    if budget.device is not None:
        bought = _cheapest_with(parse_bytes(budget.device), budget.device)
        return (
            bought,
            f"device: {bought.name}, the cheapest GPU by the hour in the catalogue with budget.device={budget.device}",
        )
    return None, "device: this machine's processor, because it has no GPU"


def limits(gpu: Gpu | None, budget: Budget, num_processes: int = 1) -> BudgetVerdict:
    """Return the memory that a process may take: the budget, capped by what other programs leave free on the device.

    Args:
        gpu: the device; None: this machine's processor.
        budget: the budget of the run.
        num_processes: processes on the machine, which share its host memory evenly.

    Raises:
        UserError: if a budget is not a size.
    """
    device = None if budget.device is None else parse_bytes(budget.device)
    if gpu is not None:
        device = gpu.available_bytes if device is None else min(device, gpu.available_bytes)
    return BudgetVerdict(device_bytes=device, host_bytes=budget.host_bytes(num_processes))


def capped_bytes(budget: Budget, overhead: Mapping[str, int]) -> int | None:
    """Return the most bytes that a run lets the caching allocator hold, see ``training/step/budget_cap.py``.

    Args:
        budget: the budget of the process.
        overhead: bytes that the process holds outside the allocator.

    Returns:
        The bytes; None: all there are.
    """
    if not budget.enforce or budget.device is None:
        return None
    return max(0, allocator_cap(parse_bytes(budget.device), overhead))


def budget_beyond(gpu: Gpu | None, budget: Budget) -> str:
    """Return the message about a budget that the GPU cannot offer; empty if it can."""
    if gpu is None or budget.device is None or is_of_size(gpu.memory_bytes, parse_bytes(budget.device)):
        return ""
    return (
        f"limit: the {format_bytes(gpu.memory_bytes)} that {gpu.name} has, because budget.device={budget.device} is "
        "more; training would refuse it"
    )


def processor_name() -> str:
    """Return a name for this machine's processor."""
    return f"cpu ({platform.machine()})"


def _cheapest_with(num_bytes: int, text: str) -> Gpu:
    large_enough = [gpu for gpu in load_gpus().values() if is_of_size(gpu.memory_bytes, num_bytes)]
    if not large_enough:
        raise UserError(beyond_all(text))

    def cost(gpu: Gpu) -> tuple[bool, float, int]:
        price = gpu.cheapest_price
        return not gpu.has_bfloat16, float("inf") if price is None else price.usd_per_hour, gpu.memory_bytes

    return min(large_enough, key=cost)
