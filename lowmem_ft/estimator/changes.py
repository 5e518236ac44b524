"""The cheapest changes that make a recipe fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowmem_ft.budget import Budget
from lowmem_ft.catalog.gpu import Gpu
from lowmem_ft.errors import UserError
from lowmem_ft.estimator.estimate import estimate_memory
from lowmem_ft.memory.estimate import MemoryEstimate
from lowmem_ft.recipe import Recipe
from lowmem_ft.training.ways_out import WayOut, ways_out_of

NUM_CHANGES = 3
ENOUGH_ESTIMATES = 20
"""Each takes seconds: with a first answer at hand, the search ends here."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings that need less memory.

    Args:
        overrides: the settings as they are typed.
        why: what they do, in a clause each.
        estimate: of the recipe with them.
    """

    overrides: tuple[str, ...]
    why: str
    estimate: MemoryEstimate


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What would make a recipe fit.

    Args:
        fitting: the changes that do, cheapest first; empty if none does.
        all_together: everything that the device lets one change, at once: what is missing even then, where nothing
            fits; None if there is nothing left to change.
    """

    fitting: tuple[Change, ...]
    all_together: Change | None


def cheapest_changes(
    recipe: Recipe, gpu: str | Gpu | None = None, *, budget: Budget | None = None
) -> Changes:
    """The three cheapest ways to make a recipe fit, each estimated; fewer if there are no more.

    A way is as dear as the dearest change in it, in the order of ``ways_out_of``, and holds no change that it could do
    without. Each does without the dearest change of those before it.

    Args:
        recipe: what does not fit.
        gpu: where, as for ``estimate_memory``.
        budget: what may be used; None: the recipe's own.

    Returns:
        The changes.
    """
    search = _Search(recipe, gpu, budget)
    ways = [way for way in ways_out_of(recipe) if search.can_run(way)]
    all_together = search.change(ways) if ways else None
    found: list[Change] = []
    spent: list[WayOut] = []
    for index, dearest in enumerate(ways):
        combines = all_together is not None and all_together.estimate.fits
        cheaper = [way for way in ways[:index] if way not in spent] if combines else []
        change = search.cheapest_with(dearest, cheaper)
        if change is not None:
            found.append(change)
            spent.append(dearest)
        if len(found) == NUM_CHANGES or (found and search.num_estimates >= ENOUGH_ESTIMATES):
            break
    return Changes(fitting=tuple(found), all_together=all_together)


class _Search:
    """Estimates of a recipe with changes, each made once."""

    def __init__(self, recipe: Recipe, gpu: str | Gpu | None, budget: Budget | None) -> None:
        self._recipe = recipe
        self._gpu = gpu
        self._budget = budget
        self._changes: dict[tuple[str, ...], Change] = {}

    @property
    def num_estimates(self) -> int:
        return len(self._changes)

    def can_run(self, way: WayOut) -> bool:
        """Whether the device can; not bf16 where it has none, for instance."""
        try:
            self.change([way])
        except UserError:
            return False
        return True

    def cheapest_with(self, dearest: WayOut, cheaper: Sequence[WayOut]) -> Change | None:
        """The dearest change with as few and as cheap others as it needs; None if all of them are not enough."""
        alone = self.change([dearest])
        if alone.estimate.fits or not cheaper:
            return alone if alone.estimate.fits else None
        needed = [*cheaper, dearest]
        if not self.change(needed).estimate.fits:
            return None
        for way in reversed(cheaper):
            without = [other for other in needed if other is not way]
            if self.change(without).estimate.fits:
                needed = without
        return self.change(needed)

    def change(self, ways: Iterable[WayOut]) -> Change:
        """The recipe with some changes; of two for one key the later counts."""
        ways = list({frozenset(way.settings): way for way in ways}.values())
        overrides = tuple(override for way in ways for override in way.overrides)
        if overrides not in self._changes:
            recipe = self._recipe
            for way in ways:
                recipe = way.applied_to(recipe)
            self._changes[overrides] = Change(
                overrides=overrides,
                why="; ".join(way.why for way in ways),
                estimate=estimate_memory(recipe, self._gpu, budget=self._budget),
            )
        return self._changes[overrides]
