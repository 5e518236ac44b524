"""The cheapest changes that make a recipe fit."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.planning.estimator.device_target import choose_gpu
from lowmem_ft.planning.estimator.estimate import estimate_memory
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.space.remediations import Remediation, remediations_for

NUM_CHANGES = 3
ENOUGH_ESTIMATES, ENOUGH_EVENTS = 20, 150_000
"""Each estimate takes seconds, more for a longer trace: once a first answer is found, the search ends at either."""

Ways = Sequence[Remediation]
"""Changes to make together, the cheapest first."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings that need less memory.

    Args:
        way: the settings, with a clause each on their effect.
        estimate: the estimate of the recipe with these settings.
    """

    way: Remediation
    estimate: MemoryEstimate

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings as a user types them."""
        return self.way.overrides

    @property
    def why(self) -> str:
        """The effect of the settings."""
        return self.way.why

    def to_json(self) -> dict[str, Any]:
        """Return the change as JSON types, with the peaks that it leads to."""
        return {
            "overrides": list(self.overrides),
            "why": self.why,
            "device": self.estimate.to_json()["device"],
            "host": self.estimate.to_json()["host"],
        }


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Changes that make a recipe fit.

    Args:
        fitting: the changes that make it fit, cheapest first; may be empty.
        all_together: all changes that the device allows, at once: where nothing fits, it shows what is missing even
            then; None if there is nothing left to change, or nothing needed trying.
        complete: whether the search ran to its end; combinations not tried by then may fit too.
    """

    fitting: tuple[Change, ...]
    all_together: Change | None
    complete: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return the changes as JSON types, with the names of the published schema."""
        together = self.all_together
        return {
            "fitting": [change.to_json() for change in self.fitting],
            "all_together": None if together is None else together.to_json(),
            "complete": self.complete,
        }


class Outlook(Protocol):
    """Bounds and expectations of a recipe on a device, without an estimate."""

    def cannot_fit(self, recipe: Recipe) -> bool:
        """Return whether it is proven to need more memory than there is."""
        ...

    def should_fit(self, recipe: Recipe) -> bool:
        """Return whether it is expected to fit: this decides what is estimated first, and nothing else."""
        ...


class ChangeSearch:
    """Search for the cheapest ways to make a recipe fit; iterating yields each one as it is found.

    A way costs as much as the dearest change in it, in the order of ``remediations_for``, and contains no change that
    it could do without. Each way leaves out the dearest change of those before it.

    The search assumes that what fits still fits with further changes, so that it can bisect and one estimate answers
    for more and for fewer changes. Where that is false (vertical order may keep more rows waiting), it can miss a
    cheaper way; each way that it finds does fit. It estimates nothing twice, and nothing that a bound excludes. It
    tries changes that preserve the mathematics first: where they suffice, nothing else needs an estimate.

    Args:
        recipe: the recipe that does not fit.
        gpu: the device, as for ``estimate_memory``.
        budget: the memory that may be used; None: the recipe's own budget.
        kept: traces made before, as for ``estimate_memory``.
        on_estimate: called before each estimate, with the number of estimates made so far.
        exact: whether to try only changes that train the same numbers, up to the order of sums.
        outlook: bounds and expectations, which save estimates; None: use only estimates.
    """

    def __init__(
        self,
        recipe: Recipe,
        gpu: str | Gpu | None = None,
        *,
        budget: Budget | None = None,
        kept: KeptTraces | None = None,
        on_estimate: Callable[[int], None] = lambda num_estimates: None,
        exact: bool = False,
        outlook: Outlook | None = None,
    ) -> None:
        self._outlook = outlook
        self._exact = exact
        self._recipe = recipe
        self._gpu = gpu
        self._budget = budget
        self._kept = kept
        self._on_estimate = on_estimate
        self._estimates: dict[tuple[str, ...], MemoryEstimate | UserError] = {}
        self._enough: dict[frozenset[str], Ways] = {}
        self._too_few: list[frozenset[str]] = []
        self._found: list[Change] = []
        self._all_together: Change | None = None

    def __iter__(self) -> Iterator[Change]:
        """Yield the ways, cheapest first; at most three."""
        ways = remediations_for(self._recipe, has_bfloat16=self._has_bfloat16())
        ways = [way for way in ways if not self._exact or way.is_exact_for(self._recipe)]
        too_few = 0  # number of ways: those cheaper than the dearest change of the previous way do not fit
        while len(self._found) < NUM_CHANGES and not (self._found and self._has_tried_enough()):
            num_that_keep = len([way for way in ways if way.keeps_mathematics_of(self._recipe)])
            number = _fewest_that_fit(ways[:num_that_keep], too_few, self._fits)
            if number is None:
                ways = self._that_run(ways)
                if not self._found:
                    self._all_together = self._change(ways) if ways else None
                number = _fewest_that_fit(ways, too_few, self._fits) if self._fits(ways) else None
            if number is None:
                break
            dearest = number - 1
            self._found.append(self._cheapest_with(ways[dearest], ways[:dearest]))
            yield self._found[-1]
            ways, too_few = [*ways[:dearest], *ways[dearest + 1 :]], dearest

    def _has_tried_enough(self) -> bool:
        estimates = [answer for answer in self._estimates.values() if not isinstance(answer, UserError)]
        num_events = sum(len(estimate.timeline.events) for estimate in estimates)
        return len(self._estimates) >= ENOUGH_ESTIMATES or num_events >= ENOUGH_EVENTS

    def _has_bfloat16(self) -> bool:
        recipe = self._recipe
        gpu, _ = choose_gpu(self._gpu, self._budget or recipe.budget, use_cpu=recipe.training.use_cpu)
        return gpu is None or gpu.has_bfloat16

    def found(self, *, complete: bool) -> Changes:
        """Return the changes found so far.

        Args:
            complete: whether the search ran to its end.
        """
        return Changes(fitting=tuple(self._found), all_together=self._all_together, complete=complete)

    def _that_run(self, ways: Ways) -> list[Remediation]:
        """Return the ways that this device and this model allow: no bf16 where the device lacks it, for instance."""
        if not ways or self._runs(ways):
            return list(ways)
        kept: list[Remediation] = []
        for way in ways:
            if self._runs([*kept, way]):
                kept.append(way)
        return kept

    def _fits(self, ways: Ways, larger: Ways = ()) -> bool:
        """Check whether the recipe fits with these changes; False without any.

        Args:
            ways: the changes.
            larger: these and more, which the search asks for next if these are not enough.
        """
        names = _names(ways)
        if any(enough <= names for enough in self._enough):
            return True
        if not ways or any(names <= too_few for too_few in self._too_few):
            return False
        if self._outlook is None:
            return self._is_estimated_to_fit(ways)
        if self._outlook.cannot_fit(self._with(ways)):
            self._too_few.append(names)
            return False
        if not self._should_fit(ways):
            is_too_few = len(larger) > len(ways) and not self._fits(larger)
            return not is_too_few and self._is_estimated_to_fit(ways)
        number = _fewest_that_fit(ways, 0, self._should_fit) or len(ways)
        fewest = _fewest_with(ways[number - 1], ways[: number - 1], self._should_fit)
        return self._is_estimated_to_fit(fewest) or self._is_estimated_to_fit(ways)

    def _should_fit(self, ways: Ways, larger: Ways = ()) -> bool:
        return self._outlook is not None and self._outlook.should_fit(self._with(ways))

    def _is_estimated_to_fit(self, ways: Ways) -> bool:
        estimate = self._estimate(ways)
        if isinstance(estimate, UserError):
            return False
        if estimate.fits:
            self._enough[_names(ways)] = ways
        else:
            self._too_few.append(_names(ways))
        return estimate.fits

    def _cheapest_with(self, dearest: Remediation, cheaper: Ways) -> Change:
        """Return the dearest change with as few and as cheap others as it needs: as many as were estimated to fit."""
        names = _names(_fewest_with(dearest, cheaper, self._fits))
        return self._change(next(ways for enough, ways in self._enough.items() if enough <= names))

    def _change(self, ways: Ways) -> Change:
        """Return the recipe with some changes, which can run."""
        estimate = self._estimate(ways)
        assert not isinstance(estimate, UserError), "only changes that can run get this far"
        return Change(
            way=_together(self._recipe, ways),
            estimate=estimate,
        )

    def _runs(self, ways: Ways) -> bool:
        return not isinstance(self._estimate(ways), UserError)

    def _estimate(self, ways: Ways) -> MemoryEstimate | UserError:
        overrides = _together(self._recipe, ways).overrides
        if overrides not in self._estimates:
            self._on_estimate(len(self._estimates))
            try:
                self._estimates[overrides] = estimate_memory(
                    self._with(ways), self._gpu, budget=self._budget, kept=self._kept
                )
            except UserError as error:
                self._estimates[overrides] = error
        return self._estimates[overrides]

    def _with(self, ways: Ways) -> Recipe:
        return _together(self._recipe, ways).applied_to(self._recipe)


def _fewest_that_fit(ways: Ways, too_few: int, fits: Callable[[Ways], bool]) -> int | None:
    """Return how many of the first ways are enough; None if all of them are not."""
    numbers = range(too_few + 1, len(ways) + 1)
    place = bisect.bisect_left(numbers, True, key=lambda number: fits(ways[:number]))
    return numbers[place] if place < len(numbers) else None


def _fewest_with(dearest: Remediation, cheaper: Ways, fits: Callable[[Ways, Ways], bool]) -> Ways:
    """Return the dearest change with as few and as cheap others as it needs, where all of them together fit."""
    needed, others = [dearest], list(cheaper)
    while not fits(needed, [*others[:-1], *needed]):
        enough = len(others)  # number of the others; the dearest comes last and is checked first
        if fits([*others[:-1], *needed], ()):
            fewer = range(1, enough - 1)
            enough = 1 + bisect.bisect_left(
                fewer, True, key=lambda number: fits([*others[:number], *needed], ())
            )
        needed, others = [others[enough - 1], *needed], others[: enough - 1]
    return needed


def _names(ways: Ways) -> frozenset[str]:
    return frozenset(way.overrides_text for way in ways)


def _together(recipe: Recipe, ways: Ways) -> Remediation:
    """Merge changes into one; if two set the same key, the later wins."""
    settings: dict[str, Any] = {}
    for way in ways:
        settings |= way.settings
    return Remediation(
        settings={key: value for key, value in settings.items() if value != operator.attrgetter(key)(recipe)},
        why="; ".join(way.why for way in ways),
    )
