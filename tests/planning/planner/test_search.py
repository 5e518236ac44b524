"""The search against looking at everything, over random small spaces whose needs are made up."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from lowmem_ft.planning.planner.search.best_found import NEARLY_AS_FAST
from lowmem_ft.planning.planner.search.candidates import Candidates, _matters
from lowmem_ft.planning.planner.search.estimated_needs import Limits, Need, Searched
from lowmem_ft.planning.planner.search.estimated_search import (
    LEAST_PROMISE,
    MAX_EFFORT,
    NEAREST_TRIED,
    SIMPLER_TRIED,
)
from lowmem_ft.planning.planner.search.ranking import Beliefs, Prior
from lowmem_ft.planning.planner.search.search import Search

NUM_SPACES = 300


class MadeUp:
    """Needs with no order in them: knobs work together at random, so that less of one may mean more of another.

    Bounds are below the needs by random shares, for some combinations by nothing.
    """

    def __init__(self, seed: int, num_dimensions: int = 4, most_choices: int = 4) -> None:
        random = np.random.default_rng(seed)
        self.sizes = tuple(random.integers(2, most_choices + 1, num_dimensions).tolist())
        choices_ND = np.array(list(itertools.product(*map(range, self.sizes))), dtype=np.int64)
        valid = choices_ND[random.random(len(choices_ND)) < 0.8]
        choices_ND = valid if len(valid) else choices_ND
        num = len(choices_ND)
        # Few numbers, so that some are equal, and some nearly.
        self.seconds = random.integers(1, 30, num) * random.choice([1.0, 1.003, 1.006], num)
        self.device = random.gamma(2.0, 10.0, num)
        self.host = random.gamma(2.0, 10.0, num)
        self.breaks = random.random(num) < 0.05
        self.candidates = Candidates(
            choices_ND=choices_ND,
            before_N=random.integers(0, 2, num) if seed % 3 == 0 else np.zeros(num, dtype=np.int64),
            after_N=random.permutation(num),
            changes_N=random.integers(0, 4, num),
            seconds_N=self.seconds * random.choice([0.3, 0.7, 1.0], num),
            device_bytes_N=self.device * random.choice([0.0, 0.5, 1.0], num),
            host_bytes_N=self.host * random.choice([0.0, 0.5, 1.0], num),
        )
        self.asked: list[int] = []

    def need_of(self, limits: Limits):
        def need(place: int) -> Need | str:
            self.asked.append(place)
            if self.breaks[place]:
                return "cannot be built"
            device, host = float(self.device[place]), float(self.host[place])
            fits = device <= limits.device_bytes and host <= limits.host_bytes
            return Need(seconds=float(self.seconds[place]), device_bytes=device, host_bytes=host, fits=fits)

        return need

    def search(self, limits: Limits, max_effort: float | None = None) -> Search:
        prior = Prior.flat(len(self.candidates))
        return Search(self.candidates, limits, self.need_of(limits), prior, max_effort=max_effort)

    def fitting(self, limits: Limits) -> list[int]:
        return [
            place
            for place in range(len(self.candidates))
            if not self.breaks[place]
            and self.device[place] <= limits.device_bytes
            and self.host[place] <= limits.host_bytes
        ]

    def best(self, limits: Limits) -> int | None:
        """By looking at every one: :func:`chosen_of`."""
        fitting = self.fitting(limits)
        if not fitting:
            return None
        before, seconds, _ = self.key(min(fitting, key=self.key))
        if not seconds:
            return min(fitting, key=self.key)
        return self.chosen_of(
            [
                place
                for place in fitting
                if self.candidates.before_N[place] == before
                and self.seconds[place] <= (1 + NEARLY_AS_FAST) * seconds
            ]
        )

    def chosen_of(self, alike: Sequence[int]) -> int:
        """The simplest of some, but nothing slower than what would be chosen with less memory, however little less."""
        most = math.inf
        for device, host in itertools.product(self.device[alike], self.host[alike]):
            with_less = [
                place for place in alike if self.device[place] <= device and self.host[place] <= host
            ]
            if with_less and len(with_less) < len(alike):
                most = min(most, self.seconds[self.chosen_of(with_less)])
        return min(
            (place for place in alike if self.seconds[place] <= most),
            key=lambda place: (self.candidates.changes_N[place], *self.key(place)),
        )

    def key(self, place: int) -> tuple[int, float, int]:
        candidates = self.candidates
        return int(candidates.before_N[place]), float(self.seconds[place]), int(candidates.after_N[place])


LIMITS = [
    Limits(device_bytes=device, host_bytes=host) for device in (5.0, 15.0, 40.0) for host in (15.0, 1e9)
]


@pytest.mark.parametrize("first", range(0, NUM_SPACES, 50))
def test_it_finds_what_looking_at_everything_finds(first):
    num_spared = 0
    for seed in range(first, first + 50):
        limits = LIMITS[seed % len(LIMITS)]
        made_up = MadeUp(seed, num_dimensions=3 if seed % 2 else 2)
        found = made_up.search(limits).run(0)
        assert found.best == made_up.best(limits), seed
        assert found.is_proven
        assert len(set(made_up.asked)) == len(made_up.asked)
        counted = len(found.needs) + len(found.refused) + found.beyond_bytes + found.beyond_seconds
        assert counted == len(made_up.candidates)
        num_spared += len(made_up.candidates) - len(made_up.asked)
    assert num_spared > 0


def test_more_memory_never_makes_the_best_slower():
    """Though a simpler one may be the best that is slower than the fastest, by half a hundredth at most."""
    num_simpler = 0
    for seed in range(40):
        made_up = MadeUp(seed, num_dimensions=3)
        before = None
        for size in np.geomspace(5.0, 80.0, 20):
            found = made_up.search(Limits(device_bytes=size, host_bytes=2 * size)).run()
            if found.best is None or found.fastest is None:
                assert before is None
                continue
            if before is not None:
                assert made_up.key(found.best)[:2] <= made_up.key(before)[:2], (seed, size)
            assert made_up.seconds[found.best] <= (1 + NEARLY_AS_FAST) * made_up.seconds[found.fastest]
            num_simpler += bool(made_up.seconds[found.best] > made_up.seconds[found.fastest])
            before = found.best
    assert num_simpler


@pytest.mark.filterwarnings("error")
def test_without_a_clock_the_least_change_that_fits_is_found():
    """As on a CPU: all seconds are 0, and what comes first by price is the best."""
    for seed in range(20):
        made_up = MadeUp(seed, num_dimensions=3)
        made_up.seconds[:] = made_up.candidates.seconds_N[:] = 0.0
        limits = LIMITS[seed % len(LIMITS)]
        assert made_up.search(limits).run(0).best == made_up.best(limits), seed


def neighbours(choices_ND: np.ndarray, place: int) -> list[int]:
    return np.flatnonzero((choices_ND != choices_ND[place]).sum(axis=1) == 1).tolist()


def test_whatever_differs_from_the_best_in_one_choice_and_may_be_better_has_been_looked_at():
    """The effort was over long before. What should not fit, or be neither faster nor simpler, may be left."""
    num_left = num_asked = 0
    for seed in range(30):
        made_up, limits = MadeUp(seed, num_dimensions=4), LIMITS[seed % len(LIMITS)]
        search = Search(
            made_up.candidates,
            limits,
            made_up.need_of(limits),
            Prior.flat(len(made_up.candidates)),
            max_effort=4,
            simpler_tried=2,
        )
        search.run(0)
        search.look_around()
        found = search.conclude()
        if found.best is None:
            continue
        around = neighbours(made_up.candidates.choices_ND, found.best)
        num_left += sum(map(search.is_open, around))
        num_asked += sum(place in found.needs for place in around)
        assert not search.around(found.best), seed
        assert found.best == made_up.chosen_of(
            [place for place in found.needs if is_nearly_the_fastest(made_up, found, place)]
        )
    assert 0 < num_left < num_asked


def is_nearly_the_fastest(made_up: MadeUp, found: Searched, place: int) -> bool:
    before, seconds, _ = made_up.key(found.fastest)
    is_alike = made_up.candidates.before_N[place] == before
    return found.needs[place].fits and is_alike and made_up.seconds[place] <= (1 + NEARLY_AS_FAST) * seconds


def test_a_search_that_is_ended_early_says_what_it_left():
    made_up = MadeUp(7)
    found = made_up.search(LIMITS[2], max_effort=3).run(0)
    assert len(made_up.asked) == 3
    assert not found.is_proven
    open_ = len(made_up.candidates) - 3 - found.beyond_bytes - found.beyond_seconds
    assert found.left == open_ > 0
    assert 0 < found.left_seconds <= made_up.seconds.max()


def test_ctrl_c_keeps_the_best_so_far():
    made_up = MadeUp(7)
    limits = Limits(device_bytes=60.0)
    asked = made_up.need_of(limits)

    def need_of(place: int) -> Need | str:
        if len(made_up.asked) == 3:
            raise KeyboardInterrupt
        return asked(place)

    found = Search(made_up.candidates, limits, need_of, Prior.flat(len(made_up.candidates))).run(0)
    assert found.interrupted
    assert found.best is not None
    assert found.needs[found.best].seconds == min(need.seconds for need in found.needs.values() if need.fits)


class Products:
    """Needs that are products of their choices, as memory and time nearly are, with bounds that say nothing.

    Args:
        seed: makes them again.
        sizes: choices of each dimension.
        share_that_fits: of all combinations.
        effort_of_first: of an estimate, by the choice in the first dimension.
        gives_up: whether the choice in the first dimension decides before the seconds do.
        roughness: standard deviation of what the logarithm of the seconds has of each combination alone.
    """

    def __init__(
        self,
        seed: int,
        sizes: tuple[int, ...] = (5, 3, 3, 3, 3),
        *,
        share_that_fits: float = 0.3,
        effort_of_first: tuple[float, ...] | None = None,
        gives_up: bool = False,
        roughness: float = 0.0,
    ) -> None:
        random = np.random.default_rng(seed)
        self.sizes = sizes
        self.choices_ND = np.array(list(itertools.product(*map(range, sizes))), dtype=np.int64)
        self.seconds = self._product([np.exp(random.normal(0, 0.2, size)) for size in sizes])
        self.device = self._product([np.exp(random.normal(0, 0.7, size)) for size in sizes]) * 2**30
        self.seconds = self.seconds * np.exp(random.normal(0, roughness, len(self.choices_ND)))
        self.allow(share_that_fits)
        nothing = np.zeros(len(self.choices_ND))
        self.before = self.choices_ND[:, 0] if gives_up else nothing.astype(np.int64)
        self.candidates = Candidates(
            choices_ND=self.choices_ND,
            before_N=self.before,
            after_N=np.arange(len(self.choices_ND)),
            changes_N=np.count_nonzero(self.choices_ND, axis=1),
            seconds_N=nothing,
            device_bytes_N=nothing,
            host_bytes_N=nothing,
        )
        self._effort_of_first = effort_of_first or (1.0,) * sizes[0]

    def allow(self, share_that_fits: float) -> None:
        """Set the limit so that this share of all combinations fits."""
        self.limits = Limits(device_bytes=float(np.quantile(self.device, share_that_fits)))
        self.fits = self.device <= self.limits.device_bytes

    def _product(self, of_choices: list[np.ndarray]) -> np.ndarray:
        return np.prod([of[self.choices_ND[:, place]] for place, of in enumerate(of_choices)], axis=0)

    def effort(self, place: int) -> float:
        return self._effort_of_first[self.choices_ND[place, 0]]

    def searched(
        self,
        *,
        max_effort: float | None,
        least_promise: float = 0.005,
        nearest_tried: int = 0,
        simpler_tried: int = 0,
        matters: Sequence[bool] | None = None,
    ) -> Searched:
        def need_of(place: int) -> Need:
            return Need(
                seconds=float(self.seconds[place]),
                device_bytes=float(self.device[place]),
                host_bytes=1.0,
                fits=bool(self.fits[place]),
                effort=self.effort(place),
            )

        prior = Prior.flat(len(self.candidates))
        if matters is not None:
            prior = dataclasses.replace(prior, matters_D=np.array(matters))
        search = Search(
            self.candidates,
            self.limits,
            need_of,
            prior,
            max_effort=max_effort,
            least_promise=least_promise,
            nearest_tried=nearest_tried,
            simpler_tried=simpler_tried,
        )
        search.run(0)
        if simpler_tried:
            search.look_around()
        return search.conclude()


def test_what_it_learns_leads_to_the_best_soon():
    shares = []
    for seed in range(10):
        made_up = Products(seed)
        found = made_up.searched(max_effort=30)
        assert found.best is not None
        shares.append(made_up.seconds[found.best] / made_up.seconds[made_up.fits].min())
    assert np.median(shares) < 1.02  # of 405 combinations 30 were looked at; as many at random come to 1.2


def test_what_gives_up_less_goes_before_what_is_near_the_best():
    """With effort for a twentieth of them, nothing is given up that need not be."""
    for seed in range(10):
        made_up = Products(seed, (4, 3, 3, 3, 3), share_that_fits=0.1, gives_up=True)
        found = made_up.searched(max_effort=24)
        assert found.best is not None
        assert made_up.before[found.best] == made_up.before[made_up.fits].min(), seed


def test_what_gives_up_less_and_cannot_fit_does_not_use_up_the_effort():
    shares = []
    for seed in range(10):
        made_up = Products(seed, (4, 3, 3, 3, 3), gives_up=True)
        too_large = np.maximum(5 * made_up.device, 1.2 * made_up.limits.device_bytes)
        made_up.device = np.where(made_up.before < 3, too_large, made_up.device)
        made_up.fits = made_up.device <= made_up.limits.device_bytes
        found = made_up.searched(max_effort=30)
        assert found.best is not None
        shares.append(made_up.seconds[found.best] / made_up.seconds[made_up.fits].min())
    assert np.median(shares) < 1.05


def test_estimates_that_take_long_count_as_several():
    found = Products(0, effort_of_first=(5.0,) * 5).searched(max_effort=24)
    assert len(found.needs) == 5


def test_what_takes_less_to_find_out_is_asked_first():
    """An estimate with the last choice takes as long as ten others."""
    asked = np.zeros(3)
    for seed in range(10):
        made_up = Products(seed, (3, 3, 3, 3), effort_of_first=(1.0, 1.0, 10.0))
        needs = made_up.searched(max_effort=40).needs
        asked += np.bincount(made_up.choices_ND[list(needs), 0], minlength=3)
    assert asked[:2].sum() > 3 * asked[2]


def test_it_ends_where_little_is_to_be_hoped_for_unless_all_can_be_asked():
    made_up = Products(1, share_that_fits=1.0)
    greedy = made_up.searched(max_effort=200, least_promise=0.0)
    modest = made_up.searched(max_effort=200, least_promise=0.005)
    assert len(modest.needs) < len(greedy.needs) / 2
    assert modest.left > 200 - len(modest.needs)
    assert made_up.seconds[modest.best] <= (1 + NEARLY_AS_FAST) * made_up.seconds.min()
    assert Products(1, (3, 3, 3), share_that_fits=1.0).searched(max_effort=40).is_proven


def test_where_nothing_can_be_expected_to_fit_it_ends_soon_and_the_rare_one_that_fits_is_found():
    estimates = []
    for seed in range(20):
        nothing_fits = Products(seed, share_that_fits=0.0)
        nothing_fits.limits = Limits(device_bytes=0.7 * float(nothing_fits.device.min()))
        nothing_fits.fits[:] = False
        found = nothing_fits.searched(max_effort=60)
        assert found.best is None
        assert found.left, "of which it says that they might fit"
        estimates.append(len(found.needs))
        one_in_200 = Products(seed, share_that_fits=0.005)
        assert one_in_200.searched(max_effort=60).best is not None, seed
    assert sum(estimates) < 20 * 30, "half of the effort"


def test_where_nothing_was_found_to_fit_it_asks_for_what_should_miss_least():
    for seed in range(10):
        made_up = Products(seed, share_that_fits=0.0)
        made_up.limits = Limits(device_bytes=0.7 * float(made_up.device.min()))
        made_up.fits[:] = False
        found = made_up.searched(max_effort=12, nearest_tried=3)
        assert min(need.device_bytes for need in found.needs.values()) <= 1.01 * made_up.device.min(), seed


def test_choices_that_should_change_nothing_are_not_tried_one_by_one():
    """Of adapters, for example, what holds their optimizer's state: each try takes an estimate and gains nothing."""
    matters = (True, True, True, False, False)
    tried, tried_blindly = 0, 0
    for seed in range(10):
        made_up = Products(seed)
        as_first_ND = np.where(matters, made_up.choices_ND, 0)
        like = np.ravel_multi_index(tuple(as_first_ND.T), made_up.sizes)
        made_up.seconds, made_up.device = made_up.seconds[like], made_up.device[like]
        made_up.allow(0.3)
        found = made_up.searched(max_effort=30, simpler_tried=2, matters=matters)
        of_matter = {tuple(made_up.choices_ND[place][:3]) for place in found.needs}
        tried += len(found.needs) - len(of_matter)
        tried_blindly += len(made_up.searched(max_effort=30, simpler_tried=2).needs) - len(of_matter)
        assert made_up.seconds[found.best] <= 1.01 * made_up.seconds[made_up.fits].min(), seed
    assert tried < tried_blindly / 2


def test_what_matters_is_what_changes_between_combinations_that_differ_in_nothing_else():
    choices_MD = np.array(
        [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0), (0, 0, 1, 1), (1, 0, 1, 1)]
    )
    expected_3M = np.array([[5.0, 5.0, 5.0, 7.0, 5.0, 5.0], [1.0, 1.0, 1.0, 1.0, 9.0, 9.0]])
    assert _matters(choices_MD, expected_3M).tolist() == [True, True, True, True]
    expected_3M[0, 3] = 5.0
    # The last two only ever change together.
    assert _matters(choices_MD, expected_3M).tolist() == [False, False, True, True]


def test_memory_that_nothing_comes_near_decides_nothing():
    """What is free on a machine changes from one call to the next, and the same question has the same answer."""
    sizes = (3,) * 8
    choices_ND = np.array(list(itertools.product(*map(range, sizes))), dtype=np.int64)
    beliefs = Beliefs(choices_ND, Prior.flat(len(choices_ND)))
    beliefs.learn(0, {"seconds": 1.0, "device_bytes": 3e8, "host_bytes": 6e8, "effort": 1.0})
    places = np.arange(len(choices_ND))
    chances = [
        beliefs.chance(
            places,
            spare_device_bytes=np.full(len(places), 4e8),
            spare_host_bytes=np.full(len(places), free),
        )
        for free in (20e9, 22e9)
    ]
    assert np.array_equal(*chances)


def test_it_says_what_it_will_ask_next_and_asks_the_same():
    guessed_rightly = asked_in_all = 0
    for seed in range(20):
        limits = LIMITS[seed % len(LIMITS)]
        alone, guessing = MadeUp(seed, num_dimensions=3), MadeUp(seed, num_dimensions=3)
        alone.search(limits).run(0)
        guesses: list[int | None] = []
        search = Search(
            guessing.candidates,
            limits,
            guessing.need_of(limits),
            Prior.flat(len(guessing.candidates)),
            look_ahead=lambda places, guesses=guesses: guesses.append(next(places, None)),
        )
        search.run(0)
        assert guessing.asked == alone.asked, seed
        guessed_rightly += sum(
            guess == asked for guess, asked in zip(guesses, guessing.asked[1:], strict=False)
        )
        asked_in_all += len(guessing.asked)
        for number, guess in enumerate(guesses):
            assert guess not in guessing.asked[: number + 1], "what is known is no guess"
    assert guessed_rightly > asked_in_all / 4


def plans_in_growing_budgets(
    seed: int, roughness: float, max_effort: float | None
) -> list[tuple[Searched, float]]:
    """Return searches as plans make them, from the smallest budget, with the seconds of the best; infinite if none."""
    made_up = Products(seed, (4, 3, 3, 3), roughness=roughness)
    plans: list[tuple[Searched, float]] = []
    for share in np.linspace(0.05, 0.9, 8):
        made_up.allow(float(share))
        promise = LEAST_PROMISE if max_effort is not None else 0.0
        tried = {"nearest_tried": NEAREST_TRIED, "simpler_tried": SIMPLER_TRIED}
        found = made_up.searched(max_effort=max_effort, least_promise=promise, **tried)
        plans.append((found, math.inf if found.best is None else found.needs[found.best].seconds))
    return plans


def slower_with_more(plans: Sequence[tuple[Searched, float]]) -> list[tuple[Searched, float]]:
    """Return each search whose best is slower than that of a smaller budget, with the seconds of that."""
    before = itertools.accumulate((seconds for _, seconds in plans), min)
    return [
        (found, least) for (found, seconds), least in zip(plans[1:], before, strict=False) if seconds > least
    ]


@pytest.mark.parametrize(
    "roughness, max_effort",
    [(0.0, MAX_EFFORT), (0.05, None)],
    ids=str,
)
def test_more_memory_is_no_slower_where_knobs_multiply_or_the_search_runs_to_its_end(roughness, max_effort):
    for seed in range(10 if max_effort is not None else 2):
        assert not slower_with_more(plans_in_growing_budgets(seed, roughness, max_effort)), seed


def test_a_search_that_ended_early_and_is_slower_than_one_with_less_memory_says_that_it_may_be():
    """On surfaces that no model of choices predicts, where it happens: what is faster is among what it says it left."""
    num_slower = num_plans = 0
    for seed in range(10):
        plans = plans_in_growing_budgets(seed, 0.05, MAX_EFFORT)
        num_plans += len(plans)
        for found, faster_seconds in slower_with_more(plans):
            num_slower += 1
            assert found.left > 0
            assert found.left_seconds <= faster_seconds
    assert 0 < num_slower < num_plans / 4
