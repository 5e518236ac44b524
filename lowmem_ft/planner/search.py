"""The search itself: it decides which combination to estimate next, and when no other can be better.

It knows nothing of recipes. A combination has proven lower bounds of seconds and bytes, is estimated at most once, and
drops out when it has been estimated, when its bytes cannot fit, or when its seconds allow it to be neither faster nor
simpler and nearly as fast. Nothing else drops out, so a search that runs to its end has found the best. One that is
ended early reports so, and has looked at what differs from its choice in one knob and may be better.

The best is the simplest of those nearly as fast as the fastest, and no slower than the choice that the same estimates
would give with less memory: among what a search has found, more memory never makes a step slower.

Between two searches that is certain if the one with more memory ran to its end. One that ended early may be slower than
one with less memory; what is faster is then among those that it left, and takes at least its ``left_seconds``. To rule
that out, a search would have to estimate whatever a search with less memory could choose, unless a bound shows it to be
slower. Bounds do not: kernels that are no products take a tenth of any step, and of an 8B some hundred combinations
remain between the bound and the best. Nor is it known what the others choose without searching for them, each in 7 to
24 estimates and as long as this search takes; a plan has time for one. On surfaces where the choices multiply, as the
beliefs assume, none of 70 larger budgets is slower, also where each combination is off by 2% on its own; by 5%, 4 are
(``tests/planner/test_search.py``).

Axes: N combinations, D dimensions.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowmem_ft.planner.ranking import Beliefs, Prior

NEARLY_AS_FAST = 0.01
"""Share of the fastest's seconds by which the best may be slower, if it is simpler."""

LEAST_TRIED = 4
"""Estimates before a search in which nothing fits may give up: the first ones correct the expectations."""

LEAST_GAIN, LEAST_CHANCE = 5e-4, 0.02
"""Thresholds for estimating what differs from the best in one choice.

Either its expected gain in speed, as a share, or its chance to be simpler and nearly as fast has to reach them."""

LIKELY_SIMPLER = 0.25
"""Chance to fit and to be nearly as fast that makes something simpler worth an estimate."""

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The combinations to choose from.

    Args:
        choices_ND: the index of a choice for each dimension.
        before_N: decides before the seconds do; smaller is better.
        after_N: decides between equal seconds; smaller is better; no two are equal.
        changes_N: how much it changes: the less, the simpler it is.
        seconds_N: lower bound of a step's seconds.
        device_bytes_N: lower bound of the device bytes.
        host_bytes_N: lower bound of the host bytes.
    """

    choices_ND: Ints
    before_N: Ints
    after_N: Ints
    changes_N: Ints
    seconds_N: Floats
    device_bytes_N: Floats
    host_bytes_N: Floats

    def __len__(self) -> int:
        return len(self.choices_ND)

    def may_fit(self, limits: Limits) -> Bools:
        """Return which of them may fit, by their bounds."""
        is_beyond = (self.device_bytes_N > limits.device_bytes) | (self.host_bytes_N > limits.host_bytes)
        return ~is_beyond

    def least_missing(self, limits: Limits) -> float:
        """Return the least device and host bytes missing, by bounds, of the combination that lacks the fewest."""
        over_N = np.maximum(0.0, self.device_bytes_N - limits.device_bytes)
        return float((over_N + np.maximum(0.0, self.host_bytes_N - limits.host_bytes)).min())


@dataclass(frozen=True, kw_only=True)
class Need:
    """Needs of a combination, as estimated.

    Args:
        seconds: seconds of a step.
        device_bytes: bytes of the device, with the headroom that is required.
        host_bytes: bytes of the host, likewise.
        fits: whether that much is available, and nothing else prevents the run.
        effort: effort of the estimate, in common estimates.
        estimate: source of the numbers.
    """

    seconds: float
    device_bytes: float
    host_bytes: float
    fits: bool
    effort: float = 1.0
    estimate: Any = None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The bytes available; infinite if there is no limit."""

    device_bytes: float = float("inf")
    host_bytes: float = float("inf")

    def missing(self, device_bytes: float, host_bytes: float) -> tuple[int, int]:
        """Return the bytes missing on the device and on the host; with as many more it would fit."""
        over = device_bytes - self.device_bytes, host_bytes - self.host_bytes
        return math.ceil(max(0.0, over[0])), math.ceil(max(0.0, over[1]))


@dataclass(kw_only=True)
class Searched:
    """Results of a search so far.

    Args:
        best: the index of the best combination, as the module defines it; None if none fits.
        fastest: the index of the fastest.
        needs: needs of each that was estimated, in that order.
        refused: reasons of the device or the model against others, which only building them showed.
        beyond_bytes: number that cannot fit by their bounds.
        beyond_seconds: number that cannot be better by their bounds.
        left: number of all others.
        left_seconds: least seconds of a step among those left.
        interrupted: whether the user ended it.
    """

    best: int | None = None
    fastest: int | None = None
    needs: dict[int, Need] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    beyond_bytes: int = 0
    beyond_seconds: int = 0
    left: int = 0
    left_seconds: float = 0.0
    interrupted: bool = False

    @property
    def is_proven(self) -> bool:
        """True if nothing is left that could be better."""
        return self.left == 0


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
        self._limits = limits
        self._need_of = need_of
        self._beliefs = Beliefs(candidates.choices_ND, prior)
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
        """Estimate what may be simpler, then what differs from the best in one choice, until none is better."""
        looked_at = None
        while self.found.best is not None and self.found.best != looked_at:
            looked_at = self.found.best
            for _ in range(self._simpler_tried):
                simpler = self._likely_simpler()
                if simpler is None:
                    break
                self.estimate(simpler)
            while self.found.best == looked_at and (around := self.around(looked_at)):
                self.estimate(around[0], then=around[1:])

    def around(self, place: int) -> list[int]:
        """Return what differs from one in a single choice and may still be better, the most promising first.

        Leaves out those without prospects: those not expected to fit, and those neither faster nor simpler.
        """
        open_, candidates, found = np.flatnonzero(self._open_N), self.candidates, self.found
        near = open_[(candidates.choices_ND[open_] != candidates.choices_ND[place]).sum(axis=1) == 1]
        if not len(near) or found.fastest is None:
            return near.tolist()
        fastest = found.needs[found.fastest].seconds
        promise = self._promise(near, fastest)
        is_simpler = candidates.changes_N[near] < candidates.changes_N[place]
        is_worth_it = promise >= LEAST_GAIN
        is_worth_it |= is_simpler & (self._chance_to_be_alike(near, fastest) >= LEAST_CHANCE)
        is_worth_it |= candidates.before_N[near] < candidates.before_N[place]
        order = np.lexsort((candidates.after_N[near], -promise))
        return near[order[is_worth_it[order]]].tolist()

    def _chance_to_be_alike(self, places: Ints, fastest_seconds: float) -> Floats:
        """Return the probability that each fits and is nearly as fast as the fastest."""
        chance, most = self._chance(places), (1 + NEARLY_AS_FAST) * fastest_seconds
        return chance * self._beliefs.chance_within(places, self.candidates.seconds_N[places], most)

    def _likely_simpler(self) -> int | None:
        """Return the simplest that should fit and be nearly as fast as the fastest, or None."""
        found, candidates = self.found, self.candidates
        if found.best is None or found.fastest is None or not self._beliefs.knows:
            return None
        simpler_N = self._open_N & (candidates.changes_N < candidates.changes_N[found.best])
        places = np.flatnonzero(simpler_N & (candidates.before_N == candidates.before_N[found.best]))
        if not len(places) or not found.needs[found.fastest].seconds:
            return None
        chance = self._chance_to_be_alike(places, found.needs[found.fastest].seconds)
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
        if not self._beliefs.knows:
            return
        imagined = copy.copy(self)
        imagined._open_N, imagined._unknown_N = self._open_N.copy(), self._unknown_N.copy()
        imagined._beliefs = copy.deepcopy(self._beliefs)
        imagined.found = Searched(
            best=self.found.best, fastest=self.found.fastest, needs=dict(self.found.needs)
        )
        while place is not None:
            imagined._learn(place, imagined._expected(place))
            place = imagined._next()
            if place is not None:
                yield place

    def _expected(self, place: int) -> Need:
        """Return the needs expected of one combination, by all that is known."""
        candidates, limits = self.candidates, self._limits
        excess = self._beliefs.expected(place)
        device_bytes = float(candidates.device_bytes_N[place] + excess["device_bytes"])
        host_bytes = float(candidates.host_bytes_N[place] + excess["host_bytes"])
        return Need(
            seconds=float(candidates.seconds_N[place] + excess["seconds"]),
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            fits=not any(limits.missing(device_bytes, host_bytes)),
            effort=excess["effort"],
        )

    def _learn(self, place: int, need: Need | str) -> Need | str:
        found = self.found
        self._open_N[place] = self._unknown_N[place] = False
        if isinstance(need, str):
            found.refused[place] = need
            return need
        found.needs[place] = need
        candidates = self.candidates
        self._beliefs.learn(
            place,
            {
                "seconds": need.seconds - candidates.seconds_N[place],
                "device_bytes": need.device_bytes - candidates.device_bytes_N[place],
                "host_bytes": need.host_bytes - candidates.host_bytes_N[place],
                "effort": need.effort,
            },
        )
        if need.fits:
            if found.fastest is None or self._key(place) < self._key(found.fastest):
                found.fastest = place
            found.best = self._simplest()
            self._open_N = self._unknown_N & self._may_be_better()
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

    def _key(self, place: int) -> tuple[int, float, int]:
        candidates = self.candidates
        return (
            int(candidates.before_N[place]),
            self.found.needs[place].seconds,
            int(candidates.after_N[place]),
        )

    def _simplest(self) -> int:
        """Return the best of those that fit; the fastest if the device has no timing model."""
        found, candidates = self.found, self.candidates
        assert found.fastest is not None, "something fits"
        before, seconds, _ = self._key(found.fastest)
        if not seconds:
            return found.fastest
        alike = [
            place
            for place, need in found.needs.items()
            if need.fits
            and candidates.before_N[place] == before
            and need.seconds <= (1 + NEARLY_AS_FAST) * seconds
        ]
        return self._no_slower_than_with_less(alike)

    def _no_slower_than_with_less(self, alike: Sequence[int]) -> int:
        """Return the simplest of some that are nearly as fast, but none slower than the choice with less memory.

        Over the pairs of device and host memory that two of them need, from the least up, the choice only gets faster.
        """
        needs, chosen = self.found.needs, dict[tuple[int, int], int]()
        devices = sorted({needs[place].device_bytes for place in alike})
        hosts = sorted({needs[place].host_bytes for place in alike})
        for corner in itertools.product(range(len(devices)), range(len(hosts))):
            device, host = corner
            with_less = (chosen.get((device - 1, host)), chosen.get((device, host - 1)))
            most = min((needs[place].seconds for place in with_less if place is not None), default=math.inf)
            there = [
                place
                for place in alike
                if needs[place].device_bytes <= devices[device]
                and needs[place].host_bytes <= hosts[host]
                and needs[place].seconds <= most
            ]
            if there:
                chosen[corner] = min(
                    there, key=lambda place: (int(self.candidates.changes_N[place]), *self._key(place))
                )
        return chosen[len(devices) - 1, len(hosts) - 1]

    def _may_be_better(self) -> Bools:
        """Return which of all might be faster, or simpler and nearly as fast, if they took their least seconds."""
        found, candidates = self.found, self.candidates
        assert found.fastest is not None, "something fits"
        assert found.best is not None, "something fits"
        before, seconds, _ = self._key(found.fastest)
        _, of_best, after = self._key(found.best)
        bound_N = candidates.seconds_N
        better_N = (bound_N < of_best) | ((bound_N == of_best) & (candidates.after_N < after))
        if seconds:
            is_simple_N = candidates.changes_N < candidates.changes_N[found.best]
            better_N |= is_simple_N & (bound_N <= (1 + NEARLY_AS_FAST) * seconds)
        return (candidates.before_N < before) | ((candidates.before_N == before) & better_N)

    def _next(self) -> int | None:
        """Return the one with the most promise per effort, by its chance to fit and its expected speed, or None."""
        open_ = np.flatnonzero(self._open_N)
        if not len(open_):
            return None
        best = self.found.fastest
        if best is None:
            return None if self._is_hopeless(open_) else self._worthiest(open_, self._promise(open_, None))
        before_N = self.candidates.before_N
        gives_up_less = open_[before_N[open_] < before_N[best]]
        if len(gives_up_less):
            # Better however long they take, if one can be expected to fit: searched as if nothing fitted yet.
            promise = self._promise(gives_up_less, None)
            if promise.max() >= self._least_promise:
                return self._worthiest(gives_up_less, promise)
        promise = self._promise(open_, self.found.needs[best].seconds)
        if promise.max() < self._least_promise and len(open_) > self._effort_left:
            return None
        near = self._near(best, open_, promise)
        return self._worthiest(open_[near], promise[near])

    def _is_hopeless(self, open_: Ints) -> bool:
        """Return whether none of those left can be expected to fit, after likelier ones did not."""
        if len(self.found.needs) < LEAST_TRIED or len(open_) <= self._effort_left:
            return False
        return self._chance(open_).sum() < self._least_promise

    def _nearest(self) -> int:
        """Return the one of those left that should lack least; among several that should fit, the likeliest."""
        open_, candidates, limits = np.flatnonzero(self._open_N), self.candidates, self._limits
        device_N = candidates.device_bytes_N[open_] + self._beliefs.excess(open_, "device_bytes")
        host_N = candidates.host_bytes_N[open_] + self._beliefs.excess(open_, "host_bytes")
        missing_N = np.maximum(0.0, device_N - limits.device_bytes)
        missing_N += np.maximum(0.0, host_N - limits.host_bytes)
        order = np.lexsort((candidates.after_N[open_], -self._chance(open_), missing_N))
        return int(open_[order[0]])

    def _promise(self, places: Ints, best_seconds: float | None) -> Floats:
        """Return the expected gain of each, as a share of the best; the chance to fit alone without a timing model."""
        chance = self._chance(places)
        if best_seconds == 0 or not self._beliefs.knows:
            return chance
        return chance * self._beliefs.improvement(places, self.candidates.seconds_N[places], best_seconds)

    def _chance(self, places: Ints) -> Floats:
        candidates, limits = self.candidates, self._limits
        return self._beliefs.chance(
            places,
            spare_device_bytes=limits.device_bytes - candidates.device_bytes_N[places],
            spare_host_bytes=limits.host_bytes - candidates.host_bytes_N[places],
        )

    def _worthiest(self, places: Ints, promise: Floats) -> int:
        candidates, worth = self.candidates, promise / self._beliefs.excess(places, "effort")
        order = np.lexsort((candidates.after_N[places], candidates.before_N[places], -worth))
        return int(places[order[0]])

    def _near(self, best: int, places: Ints, promise: Floats) -> Bools:
        """Return those that differ from the best in one choice; if they promise nothing, in two, and so on.

        Small changes are well predicted from what has been estimated, and show what each choice does.
        """
        choices_ND = self.candidates.choices_ND
        distance = (choices_ND[places] != choices_ND[best]).sum(axis=1)
        worth_it = promise >= min(self._least_promise, float(promise.max()))
        return distance <= distance[worth_it].min()
