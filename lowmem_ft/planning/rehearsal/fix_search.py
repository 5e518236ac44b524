"""Search for settings that make a run fit that does not, each rehearsed with the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.planning.estimator.changes import Change, ChangeSearch, Outlook
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.planning.rehearsal.rehearse import rehearse
from lowmem_ft.planning.rehearsal.result import Rehearsal
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.space.search_space import with_settings


@dataclass(frozen=True, kw_only=True)
class Fix:
    """A change of settings, and the rehearsal of the run with it.

    Args:
        change: gives the same result, up to the order of sums.
        rehearsal: the rehearsal with the change, over the same steps.
    """

    change: Change
    rehearsal: Rehearsal

    def to_json(self) -> dict[str, Any]:
        """Return the change, and the main numbers of the run with it."""
        found = self.rehearsal
        return {
            "overrides": list(self.change.overrides),
            "why": self.change.why,
            "fits": found.fits,
            "rehearsed_steps": found.rehearsed_steps,
            "process_peak_bytes": found.estimate.process_peak_bytes,
            "host_peak_bytes": found.estimate.host_peak_bytes,
            "seconds": found.time.seconds,
            "cost_usd": found.cost_usd,
        }


class FixSearch:
    """Rehearsals of the smallest changes that should make a run fit by the estimate of its longest rows, one by one.

    Only tries changes that give the same result, up to the order of sums. Stop at the first whose rehearsal fits: one
    may still fail because of memory that an allocator cannot reuse, or in an evaluation.

    Args:
        found: the rehearsal that failed.
        kept: cached traces of the estimates, as for :func:`lowmem_ft.estimate_memory`.
        on_estimate: called before each estimate, with the number of those made.
        on_step: as for :func:`~lowmem_ft.planning.rehearsal.rehearse`.
        outlook_of: returns bounds and expectations of a recipe's variants on a GPU, which save estimates.
    """

    def __init__(
        self,
        found: Rehearsal,
        *,
        kept: KeptTraces | None = None,
        on_estimate: Callable[[int], None] = lambda num_estimates: None,
        on_step: Callable[[int, int], None] = lambda step, shapes: None,
        outlook_of: Callable[[Recipe, Gpu], Outlook | None] = lambda recipe, gpu: None,
    ) -> None:
        self._found, self._kept, self._on_step = found, kept, on_step
        recipe = _with_rows_as_they_are(found)
        self._search = ChangeSearch(
            recipe,
            found.gpu,
            kept=kept,
            on_estimate=on_estimate,
            exact=True,
            outlook=outlook_of(recipe, found.gpu),
        )

    def __iter__(self) -> Iterator[Fix]:
        """Yield each change with its rehearsal, over as many steps as the one that failed; three at most."""
        found = self._found
        is_part = found.rehearsed_steps < found.num_steps
        for change in self._search:
            rehearsed = rehearse(
                change.way.applied_to(found.recipe),
                found.gpu,
                steps=found.rehearsed_steps if is_part else None,
                kept=self._kept,
                on_step=self._on_step,
            )
            yield Fix(change=change, rehearsal=rehearsed)

    @property
    def all_together(self) -> Change | None:
        """Every change at once, for what is missing even then if none fits; None: there is nothing left to change."""
        return self._search.found(complete=True).all_together


def _with_rows_as_they_are(found: Rehearsal) -> Recipe:
    """Return the recipe with the longest rows met, if all were met; they may be shorter than the recipe allows."""
    recipe, length = found.recipe, found.longest.shape.length
    recipe = with_settings(recipe, {"training.use_cpu": False})
    limit = recipe.data.max_length
    if (
        found.rehearsed_steps < found.num_steps
        or recipe.data.packing
        or (limit is not None and length >= limit)
    ):
        return recipe
    return with_settings(recipe, {"data.max_length": length})
