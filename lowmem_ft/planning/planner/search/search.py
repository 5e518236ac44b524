"""The search itself: it decides which combination to estimate next, and when no other can be better.

It knows nothing of recipes. A combination has proven lower bounds of seconds and bytes, is estimated at most once, and
drops out when it has been estimated, when its bytes cannot fit, or when its seconds allow it to be neither faster nor
simpler and nearly as fast. Nothing else drops out, so a search that runs to its end has found the best. One that is
ended early reports so, and has looked at what differs from the fastest in one knob and is worth an estimate.

The best is the simplest of those nearly as fast as the fastest, and no slower than the choice that the same estimates
would give with less memory: among what a search has found, more memory never makes a step slower.

Between two searches that is certain if the one with more memory ran to its end. One that ended early may be slower than
one with less memory; what is faster is then among those that it left, and takes at least its ``left_seconds``. To rule
that out, a search would have to estimate whatever a search with less memory could choose, unless a bound shows it to be
slower. Bounds do not: kernels that are no products take a tenth of any step, and of an 8B some hundred combinations
remain between the bound and the best. Nor is it known what the others choose without searching for them, each in 7 to
24 estimates and as long as this search takes; a plan has time for one. On surfaces where the choices multiply, as the
beliefs assume, none of 70 larger budgets is slower, also where each combination is off by 2% on its own; by 5%, 4 are
(``tests/planning/planner/test_search.py``).

Axes: N combinations, D dimensions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lowmem_ft.planning.planner.search.best_found import by_speed, may_be_better, simplest
from lowmem_ft.planning.planner.search.candidates import Candidates, Ints
from lowmem_ft.planning.planner.search.estimated_needs import Limits, Need, Searched
from lowmem_ft.planning.planner.search.prospects import Prospects
from lowmem_ft.planning.planner.search.ranking import Beliefs, Prior

LEAST_TRIED = 4
"""Estimates before a search in which nothing fits may give up: the first ones correct the expectations."""

LEAST_GAIN = 3e-3
"""Expected gain in speed, as a share, that makes what differs from the best in one choice worth an estimate."""

WORTH_OF_IDLE = 0.75
"""Share of its promise that is left to a combination for each choice that should change nothing and yet is another."""

LEAST_LACK = 0.02
"""Share of the device's memory: if one more layer lacks no more, choices that change little may free it."""

LIKELY_SIMPLER = 0.25
"""Chance to fit and to be nearly as fast that makes something simpler worth an estimate."""


class Search:
    """Search for the best combination that fits; an iteration is an estimate.

    Args:
        candidates: the combinations to choose from.
        limits: the memory available.
        need_of: estimates one by its index; a returned string says why it cannot be built.
        prior: what to expect before any estimate; it decides the order and nothing else.
        max_effort: effort after which the search ends, in common estimates; None: when nothing is left that could be
            better.
        least_promise: the search ends earlier if the effort left does not reach for all that is left, and none is
            expected to be faster by this share; while nothing fits, if the chances of all to fit add up to less.
            Combinations that give up less than the best are skipped by the same rule.
        nearest_tried: if it would end with nothing that fits, it estimates this many that should lack least.
        simpler_tried: with something that fits, it estimates this many that should be simpler and nearly as fast.
        look_ahead: called before each estimate with what would be asked next if that comes out as expected; it cannot
            change the result.
    """

    def __init__(
        self,
        candidates: Candidates,
        limits: Limits,
        need_of: Callable[[int], Need | str],
        prior: Prior,
        *,
        max_effort: float | None = None,
        least_promise: float = 0.0,
        nearest_tried: int = 0,
        simpler_tried: int = 0,
        look_ahead: Callable[[Iterator[int]], None] = lambda places: None,
    ) -> None:
        self.candidates = candidates
        self._need_of = need_of
        self._prospects = Prospects(candidates, limits, Beliefs(candidates.choices_ND, prior))
        self._max_effort = max_effort
        self._least_promise = least_promise
        self._nearest_tried = nearest_tried
        self._simpler_tried = simpler_tried
        self._look_ahead = look_ahead
        self._unknown_N = candidates.may_fit(limits)
        self._open_N = self._unknown_N.copy()
        self.found = Searched(beyond_bytes=int((~self._unknown_N).sum()))

    def run(self, first: int | None = None) -> Searched:
        """Search until nothing is left that could be better, or the effort is used up.

        Args:
            first: index to estimate first, if its bounds let it fit.

        Returns:
            The results; Ctrl-C ends the search early.
        """
        try:
            if first is not None and self._open_N[first] and self._effort_left > 0:
                self.estimate(first)
            self._ask_what_promises_most()
            for _ in range(self._nearest_tried):
                if self.found.best is None and self._open_N.any():
                    self.estimate(self._nearest())
            self._ask_what_promises_most()  # if one of those fits after all
        except KeyboardInterrupt:
            self.found.interrupted = True
        return self.conclude()

    def _ask_what_promises_most(self) -> None:
        while self._effort_left > 0 and (place := self._next()) is not None:
            self.estimate(place)

    def look_around(self) -> None:
        """Estimate what differs from the fastest in one choice, until none is faster, then what may be simpler."""
        looked_at = None
        while (fastest := self.found.fastest) is not None and self._is_faster(fastest, looked_at):
            looked_at = fastest
            while not self._is_faster(self.found.fastest, looked_at) and (around := self.around(looked_at)):
                self.estimate(around[0], then=around[1:])
        for _ in range(self._simpler_tried):
            simpler = self._likely_simpler()
            if simpler is None:
                break
            self.estimate(simpler)

    def _is_faster(self, place: int | None, than: int | None) -> bool:
        """Return whether one is faster than another by a gain that is worth an estimate, or gives up less."""
        if place is None or than is None or place == than:
            return than is None
        before_N, needs = self.candidates.before_N, self.found.needs
        is_gain = needs[place].seconds <= (1 - LEAST_GAIN) * needs[than].seconds
        return bool(before_N[place] < before_N[than]) or is_gain

    def around(self, place: int) -> list[int]:
        """Return what differs from one in a single choice and is worth an estimate, the most promising first."""
        open_, candidates = np.flatnonzero(self._open_N), self.candidates
        near = open_[(candidates.choices_ND[open_] != candidates.choices_ND[place]).sum(axis=1) == 1]
        return self.worth_it(near, place)

    def worth_it(self, places: Ints | Sequence[int], than: int) -> list[int]:
        """Return which of some that may be better are worth an estimate, the most promising first.

        Leaves out those without prospects: those not expected to fit, and those neither faster nor simpler than
        another.
        """
        near, candidates, found = np.array(places, dtype=np.int64), self.candidates, self.found
        if not len(near) or found.fastest is None:
            return near.tolist()
        fastest = found.needs[found.fastest].seconds
        promise = self._prospects.promise(near, fastest)
        is_new = self._prospects.is_new(near)
        is_simpler = is_new & (candidates.changes_N[near] < candidates.changes_N[than])
        is_worth_it = (promise >= LEAST_GAIN) & (is_new | self._lacks_little(found.fastest))
        is_worth_it |= is_simpler & (self._prospects.chance_to_be_alike(near, fastest) >= LIKELY_SIMPLER)
        is_worth_it |= candidates.before_N[near] < candidates.before_N[than]
        order = np.lexsort((candidates.after_N[near], -promise))
        return near[order[is_worth_it[order]]].tolist()

    def _lacks_little(self, place: int) -> bool:
        """Return whether little memory is missing for one more of its last layers, which would be worth an estimate."""
        need, limit = self.found.needs[place], self._prospects.limits.device_bytes
        if need.one_more is None or need.one_more.device_bytes - limit > LEAST_LACK * limit:
            return False
        return need.one_more.seconds <= (1 - LEAST_GAIN) * need.seconds

    def _likely_simpler(self) -> int | None:
        """Return the simplest that should fit and be nearly as fast as the fastest, or None."""
        found, candidates = self.found, self.candidates
        if found.best is None or found.fastest is None or not self._prospects.knows:
            return None
        simpler_N = self._open_N & (candidates.changes_N < candidates.changes_N[found.best])
        places = np.flatnonzero(simpler_N & (candidates.before_N == candidates.before_N[found.best]))
        if not len(places) or not found.needs[found.fastest].seconds:
            return None
        chance = self._prospects.chance_to_be_alike(places, found.needs[found.fastest].seconds)
        likely = places[chance >= LIKELY_SIMPLER]
        if not len(likely):
            return None
        order = np.lexsort((-chance[chance >= LIKELY_SIMPLER], candidates.changes_N[likely]))
        return int(likely[order[0]])

    def estimate(self, place: int, then: Sequence[int] = ()) -> Need | str:
        """Return the needs of one combination, estimated once.

        Args:
            place: its index.
            then: indices that will be asked next, whatever comes out; without them, the search's own guess.
        """
        found = self.found
        if place in found.needs:
            return found.needs[place]
        if place in found.refused:
            return found.refused[place]
        self._look_ahead(iter(then) if then else self._likely_after(place))
        need = self._need_of(place)
        return self._learn(place, need)

    def _likely_after(self, place: int | None) -> Iterator[int]:
        """Yield the search's next choices, one after the other, if each needs what is expected of it."""
        if not self._prospects.knows:
            return
        imagined = copy.copy(self)
        imagined._open_N, imagined._unknown_N = self._open_N.copy(), self._unknown_N.copy()
        imagined._prospects = self._prospects.copied()
        imagined.found = Searched(
            best=self.found.best, fastest=self.found.fastest, needs=dict(self.found.needs)
        )
        while place is not None:
            imagined._learn(place, imagined._prospects.expected(place))
            place = imagined._next()
            if place is not None:
                yield place

    def _learn(self, place: int, need: Need | str) -> Need | str:
        found = self.found
        self._open_N[place] = self._unknown_N[place] = False
        if isinstance(need, str):
            found.refused[place] = need
            return need
        found.needs[place] = need
        candidates = self.candidates
        self._prospects.learn(place, need)
        if need.fits:
            fastest = (place,) if found.fastest is None else (found.fastest, place)
            found.fastest = min(fastest, key=lambda one: by_speed(candidates, found, one))
            found.best = simplest(candidates, found)
            self._open_N = self._unknown_N & may_be_better(candidates, found)
        return need

    def is_open(self, place: int) -> bool:
        """Return whether one may still be better than the best, by all that is known."""
        return bool(self._open_N[place])

    def conclude(self) -> Searched:
        """Return the results so far, with the counts of what is left."""
        found = self.found
        found.left = int(self._open_N.sum())
        found.beyond_seconds = int((self._unknown_N & ~self._open_N).sum())
        found.left_seconds = float(self.candidates.seconds_N[self._open_N].min()) if found.left else 0.0
        return found

    @property
    def _effort_left(self) -> float:
        found = self.found
        made = len(found.refused) + sum(need.effort for need in found.needs.values())
        return float("inf") if self._max_effort is None else self._max_effort - made

    def _next(self) -> int | None:
        """Return the one with the most promise per effort, by its chance to fit and its expected speed, or None."""
        open_ = np.flatnonzero(self._open_N)
        if not len(open_):
            return None
        best = self.found.fastest
        if best is None:
            return (
                None
                if self._is_hopeless(open_)
                else self._prospects.worthiest(open_, self._prospects.promise(open_, None))
            )
        before_N = self.candidates.before_N
        gives_up_less = open_[before_N[open_] < before_N[best]]
        if len(gives_up_less):
            # Better however long they take, if one can be expected to fit: searched as if nothing fitted yet.
            promise = self._prospects.promise(gives_up_less, None)
            if promise.max() >= self._least_promise:
                return self._prospects.worthiest(gives_up_less, promise)
        if len(open_) > self._effort_left:
            open_ = open_[self._prospects.is_new(open_)]
            if not len(open_):
                return None
        promise = self._prospects.promise(open_, self.found.needs[best].seconds)
        if promise.max() < self._least_promise and len(open_) > self._effort_left:
            return None
        near = self._prospects.near(best, open_, promise, self._least_promise)
        _, idle = self._prospects.distances(best, open_[near])
        return self._prospects.worthiest(open_[near], promise[near] * WORTH_OF_IDLE**idle)

    def _is_hopeless(self, open_: Ints) -> bool:
        """Return whether none of those left can be expected to fit, after likelier ones did not."""
        if len(self.found.needs) < LEAST_TRIED or len(open_) <= self._effort_left:
            return False
        return self._prospects.chance(open_).sum() < self._least_promise

    def _nearest(self) -> int:
        """Return the one of those left that should lack least; among several that should fit, the likeliest."""
        open_ = np.flatnonzero(self._open_N)
        likelihood, missing = self._prospects.chance(open_), self._prospects.missing(open_)
        order = np.lexsort((self.candidates.after_N[open_], -likelihood, missing))
        return int(open_[order[0]])
