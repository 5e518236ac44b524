"""The length of rows at which memory ends: a search over estimates of one recipe, or of anything else with a length."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.units import parse_bytes
from lowmem_ft.models.hf_config import load_model_config, max_positions
from lowmem_ft.planning.estimator.estimate import estimate_memory
from lowmem_ft.planning.estimator.most_that_fits import MostThatFits
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.rules.run_rules import oversized_steps
from lowmem_ft.recipe.space.search_space import with_settings

GRID_TOKENS = 64
"""The search tries multiples of this."""

RESOLUTION = 0.03
"""The search ends once its bracket is this share of the length."""

MOST_TOKENS = 1 << 20
"""The longest row that is tried where nothing else limits it."""

FIRST_TOKENS = 2048
"""The length that a search begins with where none is set."""


@dataclass(frozen=True, kw_only=True)
class LongestRows:
    """The longest rows that fit.

    Args:
        tokens: tokens of the longest row that was estimated to fit; 0: none fits.
        over_tokens: tokens of the shortest row that was estimated not to fit; None: ``most_tokens`` fit.
        most_tokens: the longest row that model and recipe allow.
        process_bytes: the process's peak at the upper end of its range, by the tokens that were tried.
        over_device_bytes: bytes of device memory that rows of ``over_tokens`` lack, by that upper end.
        over_host_bytes: bytes of host memory that they lack.
    """

    tokens: int
    over_tokens: int | None
    most_tokens: int
    process_bytes: tuple[tuple[int, int], ...]
    over_device_bytes: int = 0
    over_host_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return {**dataclasses.asdict(self), "process_bytes": [list(pair) for pair in self.process_bytes]}


def longest_rows(
    recipe: Recipe,
    gpu: Gpu,
    *,
    extra_bytes: int = 0,
    kept: KeptTraces | None = None,
    on_estimate: Callable[[int, int], object] = lambda number, tokens: None,
) -> LongestRows:
    """Find the longest rows with which a recipe fits, with all else unchanged.

    The search begins with the recipe's own length and assumes that longer rows take no less memory. What it returns
    was estimated to fit.

    Args:
        recipe: the recipe, with its processes as ``on_gpus`` fills them in.
        gpu: the GPU.
        extra_bytes: bytes of device memory to add to the GPU's, and to a budget.
        kept: traces made before, as for ``estimate_memory``.
        on_estimate: called before each estimate, with the number of estimates so far and the tokens of a row.

    Returns:
        The length, with what was tried.

    Raises:
        UserError: if the recipe cannot be estimated.
    """
    gpu, budget, kept = with_more(gpu, extra_bytes), recipe.budget, kept or KeptTraces()
    if budget.device is not None:
        budget = dataclasses.replace(budget, device=f"{parse_bytes(budget.device) + extra_bytes}B")

    def estimate_at(tokens: int) -> MemoryEstimate:
        return estimate_memory(
            with_settings(recipe, {"data.max_length": tokens}), gpu, budget=budget, kept=kept
        )

    return search_length(
        estimate_at,
        first=recipe.data.max_length or FIRST_TOKENS,
        most=most_tokens(recipe),
        on_estimate=on_estimate,
    )


def search_length(
    estimate_at: Callable[[int], MemoryEstimate],
    *,
    first: int,
    most: int,
    on_estimate: Callable[[int, int], object] = lambda number, tokens: None,
) -> LongestRows:
    """Find the longest rows that fit by an estimate for a length.

    Args:
        estimate_at: estimates rows of so many tokens.
        first: tokens to begin with.
        most: tokens of the longest row that is allowed, on the grid.
        on_estimate: as for :func:`longest_rows`.

    Returns:
        The length, with what was tried.
    """
    grid = min(GRID_TOKENS, most)

    def estimate(number: int) -> MemoryEstimate:
        on_estimate(len(search.answers), number * grid)
        return estimate_at(number * grid)

    def begin(known: tuple[int, float] | None) -> float:
        if known is None:
            return min(first, most) // grid
        number, room = known
        return 2 * number if room >= 0 else number / 2

    search = MostThatFits(estimate, _room, (1, most // grid), begin, RESOLUTION)
    longest, beyond = search.find() or 0, next(iter(search.beyond), None)
    over = None if beyond is None else search.answers[beyond]
    return LongestRows(
        tokens=longest * grid,
        over_tokens=None if beyond is None else beyond * grid,
        most_tokens=most,
        process_bytes=tuple(
            (number * grid, found.process_high_bytes) for number, found in sorted(search.answers.items())
        ),
        over_device_bytes=0 if over is None else _over(over.process_high_bytes, over.budget.device_bytes),
        over_host_bytes=0 if over is None else _over(over.host_peak_bytes, over.budget.host_bytes),
    )


def _room(found: MemoryEstimate) -> float:
    """Return the bytes of device or host memory that are left, whichever has less; infinite without a limit."""
    limits = (
        (found.budget.device_bytes, found.process_high_bytes),
        (found.budget.host_bytes, found.host_peak_bytes),
    )
    return min((limit - peak for limit, peak in limits if limit is not None), default=math.inf)


def _over(peak: int, limit: int | None) -> int:
    return 0 if limit is None else max(0, peak - limit)


def with_more(gpu: Gpu, extra_bytes: int) -> Gpu:
    """Return a GPU with more memory, and all else the same."""
    return dataclasses.replace(gpu, memory_bytes=gpu.memory_bytes + extra_bytes)


def most_tokens(recipe: Recipe) -> int:
    """Return the longest row that the model takes and a micro-batch of the recipe has room for, on the grid."""
    limit = max_positions(load_model_config(recipe.model, architecture_only=True)) or MOST_TOKENS
    most = min(limit, MOST_TOKENS)
    while most > GRID_TOKENS and any(oversized_steps(recipe, most)):
        most //= 2
    return _on_grid(most) or most


def _on_grid(tokens: float) -> int:
    return int(tokens) // GRID_TOKENS * GRID_TOKENS
