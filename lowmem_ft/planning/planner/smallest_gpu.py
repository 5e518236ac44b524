"""The smallest GPU on which a plan fits."""

from __future__ import annotations

import contextlib
import math

from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.units import GIB
from lowmem_ft.planning.planner.memory_plan import MemoryPlan
from lowmem_ft.planning.planner.plan_target import Target

GPUS_TRIED = 3
"""GPUs of the catalogue to estimate on, from the smallest that should be large enough."""


def smallest_fitting_gpu(result: MemoryPlan, target: Target) -> str | None:
    """Return the smallest GPU on which the nearest plan fits, estimated there; None if the host lacks memory.

    A plan for a GPU without bfloat16 runs on GPUs with it, not the other way round.
    """
    if target.gpu is None or result.missing_host_bytes:
        return None
    needed = target.limits.device_bytes + result.missing_device_bytes
    candidates = [
        gpu
        for gpu in load_gpus().values()
        if gpu.available_bytes >= needed and gpu.has_bfloat16 >= target.gpu.has_bfloat16
    ]
    for gpu in sorted(candidates, key=_by_size_and_price)[:GPUS_TRIED]:
        with contextlib.suppress(UserError):
            estimate, _ = target.estimate(result.recipe, gpu)
            if estimate.fits and not estimate.tight:
                return gpu.name
    return None


def _by_size_and_price(gpu: Gpu) -> tuple[int, float, int]:
    """Return the key that sorts GPUs by memory in whole GiB, as sold, of which the driver keeps some; then by rent."""
    price = gpu.cheapest_price
    return math.ceil(gpu.memory_bytes / GIB), price.usd_per_hour if price else math.inf, gpu.memory_bytes
