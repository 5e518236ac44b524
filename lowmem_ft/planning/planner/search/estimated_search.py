"""A search whose combinations are recipes, estimated on the device of a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.system.interrupts import defer_signals
from lowmem_ft.planning.planner.plan_target import Target
from lowmem_ft.planning.planner.search.candidates import Bytes, Candidates, prior_of
from lowmem_ft.planning.planner.search.estimated_needs import Limits, Need
from lowmem_ft.planning.planner.search.prefetch import EstimatesAhead
from lowmem_ft.planning.planner.search.search import Search
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.space.search_space import Space

MAX_EFFORT = 18
"""Effort of the search for the fastest, in estimates of common length, which take a second or two each.

The neighbours of the best are estimated in addition. What is left then is counted and reported."""

LEAST_PROMISE = 0.006
"""Share of a step's seconds: a search ends when it expects less improvement from any other combination."""

SIMPLER_TRIED = 2
"""Combinations with fewer changes, expected to be nearly as fast as the best, that are estimated before neighbours."""

NEAREST_TRIED = 2
"""Estimates of the combinations that should lack least, if none is found to fit or bounds prove that none can."""

NEAREST_LOOKED_AT = 500
"""Combinations that lack least by their bounds, among which a rule of thumb picks those to estimate."""


@dataclass(frozen=True, kw_only=True)
class PlanProgress:
    """Progress of planning.

    Args:
        combinations: number of valid ones to choose from.
        estimated: number of these estimated so far.
        best: estimate of the best so far; None if nothing fits yet.
    """

    combinations: int
    estimated: int
    best: MemoryEstimate | None


OnProgress = Callable[[PlanProgress], None]


@contextlib.contextmanager
def search_in(
    space: Space, candidates: Candidates, target: Target, on_progress: OnProgress, num_ahead: int = 0
) -> Iterator[Search]:
    """Yield a search of a space, whose estimates are the target's, each made once.

    Args:
        space: at least one combination.
        candidates: its combinations, with their bounds and their order.
        target: the device and the model.
        on_progress: called before each estimate.
        num_ahead: processes in addition to this one that estimate what the search should ask for next.
    """

    def asked_of(place: int) -> tuple[Recipe, Sequence[str]]:
        combination = space.combinations[place]
        return space.recipe_of(combination), space.counted(combination)

    def need_of(place: int) -> Need | str:
        raise_if_lost()
        best = search.found.best
        on_progress(
            PlanProgress(
                combinations=len(candidates),
                estimated=len(search.found.needs),
                best=None if best is None else search.found.needs[best].estimate,
            )
        )
        try:
            return ahead.take(place) or target.need(*asked_of(place))
        except UserError as error:
            return " ".join(error.problems)

    others = EstimatesAhead(num_ahead, target)
    with defer_signals() as raise_if_lost, contextlib.closing(others) as ahead:
        search = Search(
            candidates,
            target.limits,
            need_of,
            prior_of(space, candidates, target.limits, target.shape, target.gpu),
            max_effort=MAX_EFFORT,
            least_promise=LEAST_PROMISE,
            nearest_tried=NEAREST_TRIED,
            simpler_tried=SIMPLER_TRIED,
            look_ahead=lambda places: ahead.guess(places, asked_of),
        )
        yield search


def estimate_nearest(
    search: Search, candidates: Candidates, limits: Limits, expected: Callable[[int], Bytes]
) -> None:
    """Estimate the combinations that should lack least, where bounds alone show that nothing fits.

    Raises:
        UserError: if none of them can be built.
        KeyboardInterrupt: if the user had ended the search before.
    """
    if search.found.interrupted:
        raise KeyboardInterrupt

    def missing(needed: Bytes) -> int:
        return sum(limits.missing(*needed))

    bound = list(zip(candidates.device_bytes_N.tolist(), candidates.host_bytes_N.tolist(), strict=True))
    order = sorted(range(len(bound)), key=lambda place: (missing(bound[place]), candidates.after_N[place]))
    near = sorted(
        order[:NEAREST_LOOKED_AT], key=lambda place: (missing(expected(place)), candidates.after_N[place])
    )
    answers = [search.estimate(place, then=near[:NEAREST_TRIED]) for place in near[:NEAREST_TRIED]]
    if not search.found.needs:
        raise UserError(str(answers[0]))
