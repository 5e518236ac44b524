"""Cost of a run on a GPU by the catalogue's prices, and the order of GPUs by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lowmem_ft.catalog.gpu_spec import Gpu
from lowmem_ft.memory.memory_estimate import MemoryEstimate
from lowmem_ft.reports.estimate_table import price_per_million_tokens


def usd_per_million_tokens(estimate: MemoryEstimate, gpu: Gpu) -> float | None:
    """Return US dollars per million tokens; None if it does not fit, or has no price or no timing model."""
    return price_per_million_tokens(estimate.step, gpu.cheapest_price) if estimate.fits else None


def cost_cells(costs: Sequence[float | None]) -> list[str]:
    """Return prices for a column with aligned points: as many decimals as the lowest needs for two digits."""
    lowest = min((cost for cost in costs if cost), default=1.0)
    decimals = max(2, 1 - math.floor(math.log10(lowest)))
    return ["-" if cost is None else f"{cost:.{decimals}f}" for cost in costs]


def usd_per_hour(estimate: MemoryEstimate, gpu: Gpu) -> float | None:
    """Return US dollars an hour of all its GPUs; None without a price."""
    number = 1 if estimate.processes is None else estimate.processes.num_processes
    return None if gpu.cheapest_price is None else number * gpu.cheapest_price.usd_per_hour


def cost_order(estimate: MemoryEstimate, gpu: Gpu) -> tuple[int, float, int]:
    """Return the key that sorts GPUs: price of tokens, then of an hour if it does not fit; without a price, memory."""
    tokens, hour = usd_per_million_tokens(estimate, gpu), usd_per_hour(estimate, gpu)
    if tokens is not None:
        return 0, tokens, gpu.memory_bytes
    return (2, 0.0, gpu.memory_bytes) if hour is None else (1, hour, gpu.memory_bytes)


def with_cost(estimate: MemoryEstimate, gpu: Gpu | None) -> dict[str, Any]:
    """Return an estimate as JSON types, with its ``cost``; null if the GPU has no rental price."""
    price = None if gpu is None else gpu.cheapest_price
    if gpu is None or price is None:
        return {**estimate.to_json(), "cost": None}
    cost = {
        "usd_per_hour": usd_per_hour(estimate, gpu),
        "usd_per_million_tokens": usd_per_million_tokens(estimate, gpu),
        "provider": price.provider,
        "date": price.date,
    }
    return {**estimate.to_json(), "cost": cost}
