"""What a run costs on a GPU by the catalogue's prices, and the order that this puts GPUs into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lowmem_ft.catalog.gpu_spec import Gpu
from lowmem_ft.memory.memory_estimate import MemoryEstimate
from lowmem_ft.reports.estimate_table import price_per_million_tokens


def usd_per_million_tokens(estimate: MemoryEstimate, gpu: Gpu) -> float | None:
    """US dollars for a million tokens; None where it does not fit, or has no price or no clock."""
    return price_per_million_tokens(estimate.step, gpu.cheapest_price) if estimate.fits else None


def cost_cells(costs: Sequence[float | None]) -> list[str]:
    """Prices for a column, their points below each other: as many decimals as the lowest needs for two digits."""
    lowest = min((cost for cost in costs if cost), default=1.0)
    decimals = max(2, 1 - math.floor(math.log10(lowest)))
    return ["-" if cost is None else f"{cost:.{decimals}f}" for cost in costs]


def usd_per_hour(estimate: MemoryEstimate, gpu: Gpu) -> float | None:
    """US dollars an hour of all its cards; None without a price."""
    number = 1 if estimate.processes is None else estimate.processes.num_processes
    return None if gpu.cheapest_price is None else number * gpu.cheapest_price.usd_per_hour


def cost_order(estimate: MemoryEstimate, gpu: Gpu) -> tuple[int, float, int]:
    """What sorts GPUs: by the price of tokens, then of an hour where it does not fit; those without one by memory."""
    tokens, hour = usd_per_million_tokens(estimate, gpu), usd_per_hour(estimate, gpu)
    if tokens is not None:
        return 0, tokens, gpu.memory_bytes
    return (2, 0.0, gpu.memory_bytes) if hour is None else (1, hour, gpu.memory_bytes)


def with_cost(estimate: MemoryEstimate, gpu: Gpu | None) -> dict[str, Any]:
    """An estimate as JSON types, with its ``cost``; null where nobody rents the GPU out."""
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
