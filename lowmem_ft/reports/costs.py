"""Cost of a run on a GPU by the catalogue's prices, of data of the user's, and the order of GPUs by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.units import counted
from lowmem_ft.recipe import Recipe
from lowmem_ft.reports.estimate_table import format_dollars, price_per_million_tokens
from lowmem_ft.reports.estimate_words import duration


@dataclass(frozen=True, kw_only=True)
class OwnRun:
    """A run over the user's data.

    Args:
        tokens: tokens of all epochs, if every row is full.
        hours: hours of its steps.
        usd: their price in US dollars; None if no provider rents the GPU out.
    """

    tokens: int
    hours: float
    usd: float | None


@dataclass(frozen=True, kw_only=True)
class OwnData:
    """Data of the user's, of which only the number of rows is known: each is taken as full.

    Args:
        rows: number of rows.
        epochs: how often each is trained on.
    """

    rows: int
    epochs: float = 1.0

    @classmethod
    def of_words(cls, rows: str | None, epochs: str | None) -> OwnData | None:
        """Return the data by the numbers that a user typed; None without rows."""
        return None if rows is None else cls(rows=int(rows), epochs=float(epochs or 1))

    def run_on(self, estimate: MemoryEstimate, gpu: Gpu | None, row_tokens: int | None) -> OwnRun | None:
        """Return hours and dollars of the steps, without loading, evaluation and saving.

        Args:
            estimate: the estimate of a step.
            gpu: the GPU, with its price; None: it has none.
            row_tokens: the most tokens of a row; None: not known.

        Returns:
            The run; None if it does not fit, or its speed is not known.
        """
        step = estimate.step
        if not estimate.fits or step is None or not step.tokens_per_second or row_tokens is None:
            return None
        tokens = round(self.rows * self.epochs * row_tokens)
        hours = tokens / estimate.plan.in_all(step.tokens_per_second) / 3600
        hourly = None if gpu is None else usd_per_hour(estimate, gpu)
        return OwnRun(tokens=tokens, hours=hours, usd=None if hourly is None else hourly * hours)

    def run_in_words(self, estimate: MemoryEstimate, gpu: Gpu | None, row_tokens: int | None) -> str:
        """Return what a run takes, and what is assumed of the data; arguments as for :meth:`run_on`."""
        if row_tokens is None:
            return "hours are unknown, as the tokens of a row are"
        run = self.run_on(estimate, gpu, row_tokens)
        found = "hours are unknown, as it does not fit or has no known speed"
        if run is not None:
            found = f"{duration(3600 * run.hours)}{'' if run.usd is None else f', {format_dollars(run.usd)}'}"
        return f"{found}, for {self.in_words([row_tokens])}"

    def in_words(self, row_tokens: Sequence[int]) -> str:
        """Return what is assumed of the data, as a clause.

        Args:
            row_tokens: the most tokens of a row; several if settings that are compared differ in it.
        """
        lengths = " or ".join(f"{length:,}" for length in sorted(set(row_tokens)))
        tokens = round(self.rows * self.epochs * max(row_tokens, default=0))
        return (
            f"{counted(self.rows, 'row')} of at most {lengths} tokens, {self.epochs:g} "
            f"epoch{'' if self.epochs == 1 else 's'}: at most {tokens:,} tokens, as if every row were full; loading, "
            "evaluation and saving come on top"
        )


def row_tokens_of(recipe: Recipe, *estimates: MemoryEstimate) -> int | None:
    """Return the most tokens of a row of a recipe, by estimates of it; None if none has the tokens of a step."""
    training = recipe.training
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps
    tokens = (each.step.tokens for each in estimates if each.step is not None and each.step.tokens)
    return next((found // rows for found in tokens), None)


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
    price = gpu.cheapest_price
    return None if price is None else estimate.plan.in_all(price.usd_per_hour)


def cost_order(estimate: MemoryEstimate, gpu: Gpu) -> tuple[int, float, int]:
    """Return the key that sorts GPUs: price of tokens, then of an hour if it does not fit; without a price, memory."""
    tokens, hour = usd_per_million_tokens(estimate, gpu), usd_per_hour(estimate, gpu)
    if tokens is not None:
        return 0, tokens, gpu.memory_bytes
    return (2, 0.0, gpu.memory_bytes) if hour is None else (1, hour, gpu.memory_bytes)


def with_cost(
    estimate: MemoryEstimate,
    gpu: Gpu | None,
    own_data: OwnData | None = None,
    row_tokens: int | None = None,
) -> dict[str, Any]:
    """Return an estimate as JSON types, with its ``cost``; null if the GPU has no rental price.

    Args:
        estimate: the estimate.
        gpu: its GPU; None: not one of the catalogue.
        own_data: the user's data, for ``own_data``; None: no such key.
        row_tokens: the most tokens of a row.
    """
    price = None if gpu is None else gpu.cheapest_price
    cost = None
    if gpu is not None and price is not None:
        cost = {
            "usd_per_hour": usd_per_hour(estimate, gpu),
            "usd_per_million_tokens": usd_per_million_tokens(estimate, gpu),
            "provider": price.provider,
            "date": price.date,
        }
    values = {**estimate.to_json(), "cost": cost}
    if own_data is not None:
        run = own_data.run_on(estimate, gpu, row_tokens)
        values["own_data"] = run and {**asdict(own_data), **asdict(run)}
    return values
