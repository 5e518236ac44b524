"""The cheapest changes that make a recipe fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lowmem_ft.budget import Budget
from lowmem_ft.errors import UserError
from lowmem_ft.estimator.estimate import estimate_memory
from lowmem_ft.estimator.target import CPU
from lowmem_ft.memory.estimate import MemoryEstimate
from lowmem_ft.recipe import Recipe
from lowmem_ft.training.ways_out import WayOut, ways_out_of

NUM_CHANGES = 3
MOST_ESTIMATES = 16
"""Each takes seconds."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings that make a recipe fit.

    Args:
        overrides: the settings as they are typed.
        why: what they do, in a clause each.
        estimate: of the recipe with them.
    """

    overrides: tuple[str, ...]
    why: str
    estimate: MemoryEstimate


def cheapest_changes(
    recipe: Recipe, estimate: MemoryEstimate, *, budget: Budget | None = None
) -> list[Change]:
    """The three cheapest ways to make a recipe fit, each estimated; fewer, or none, if there are no more.

    Single changes come first, from no cost in time or fidelity to the most, then the combinations of two, and so on:
    no change is asked for that another part of the combination makes needless.

    Args:
        recipe: what does not fit.
        estimate: of it; its device is the one to fit.
        budget: what may be used; None: the recipe's own.

    Returns:
        The changes, cheapest first.
    """
    device = CPU if estimate.step is None else estimate.gpu.name
    found: list[Change] = []
    fitting: list[frozenset[str]] = []
    for ways in itertools.islice(_combinations(recipe, fitting), MOST_ESTIMATES):
        changed = _applied(recipe, ways)
        try:
            after = estimate_memory(changed, device, budget=budget)
        except UserError:  # such as bf16 where the GPU has none
            continue
        if after.fits:
            fitting.append(frozenset(way.overrides_text for way in ways))
            overrides = tuple(override for way in ways for override in way.overrides)
            found.append(Change(overrides=overrides, why="; ".join(way.why for way in ways), estimate=after))
        if len(found) == NUM_CHANGES:
            break
    return found


def _combinations(recipe: Recipe, fitting: Sequence[frozenset[str]]) -> Iterator[tuple[WayOut, ...]]:
    """Sets of changes, smaller ones first, that contain none which fits already; two for one key exclude each other."""
    ways = list(ways_out_of(recipe))
    for size in range(1, len(ways) + 1):
        for chosen in itertools.combinations(ways, size):
            keys = [key for way in chosen for key in way.settings]
            names = {way.overrides_text for way in chosen}
            if len(set(keys)) == len(keys) and not any(known <= names for known in fitting):
                yield chosen


def _applied(recipe: Recipe, ways: Iterable[WayOut]) -> Recipe:
    for way in ways:
        recipe = way.applied_to(recipe)
    return recipe
