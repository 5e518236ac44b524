"""Bayesian linear regression of what a search expects of combinations not yet estimated; it only orders them.

The logarithm of the excess of a need over its bound is modelled as a sum over the choices, each with a normal prior;
the posterior is that of Bayesian linear regression. The promise of a combination is its expected improvement times its
chance to fit; the next to estimate is the one with the highest promise per effort.

Axes: N combinations, D dimensions, F features (one for each choice of each dimension, and one intercept), M estimates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

Quantity = Literal["seconds", "device_bytes", "host_bytes", "effort"]

_UNKNOWN_LEVEL = 30.0

_OF_NEED: tuple[Quantity, ...] = ("seconds", "device_bytes", "host_bytes")

_NOISE: dict[Quantity, float] = {"seconds": 0.008, "device_bytes": 0.1, "host_bytes": 0.02, "effort": 0.2}
"""Standard deviation of what the sum over choices leaves out: seconds nearly add up, a peak moves about."""

_LEVEL: dict[Quantity, float] = {"seconds": 0.3, "device_bytes": 0.5, "host_bytes": 0.3, "effort": 0.5}
"""Standard deviation of the error of all expectations together."""

_SPREAD: dict[Quantity, float] = {"seconds": 0.015, "device_bytes": 0.15, "host_bytes": 0.05, "effort": 0.3}
"""Standard deviation of the error for one choice relative to another."""

_OF_IDLE = 0.2
"""Share of that error for choices that are expected to change nothing, such as adapters' optimizer state."""

_LIKELY = 0.9

_LEAST: dict[Quantity, float] = {
    "seconds": 1e-4,
    "device_bytes": 2.0**20,
    "host_bytes": 2.0**20,
    "effort": 1.0,
}
"""Least value that an excess over a bound is taken for."""

_LEAST_SHARE = 0.01
"""Least expected excess, as a share of the bound."""


@dataclass(frozen=True, kw_only=True)
class Prior:
    """Expectations of all combinations before any estimate.

    Args:
        logs_N: logarithm of the excess that each is expected to have over its bound.
        level: standard deviation of the error of all of them together.
        spread: standard deviation of a choice's effect on the logarithm, in addition to that.
        matters_D: for each dimension, whether anything is expected to change with it; None: with all of them.
    """

    logs_N: Mapping[Quantity, Floats]
    level: Mapping[Quantity, float]
    spread: Mapping[Quantity, float]
    matters_D: Bools | None = None

    @staticmethod
    def flat(num_combinations: int) -> Prior:
        """Return a prior that expects nothing in particular of this many combinations."""
        quantities = get_args(Quantity)
        return Prior(
            logs_N=dict.fromkeys(quantities, np.zeros(num_combinations)),
            level=dict.fromkeys(quantities, _UNKNOWN_LEVEL),
            spread={"seconds": 0.3, "device_bytes": 0.7, "host_bytes": 0.3, "effort": 0.7},
        )

    def expecting(self, expected: Mapping[Quantity, tuple[Floats, Floats]], matters_D: Bools) -> Prior:
        """Return this prior with expectations for some quantities.

        Args:
            expected: expected value of each combination, and its bound.
            matters_D: for each dimension, whether any of them changes with it.

        Returns:
            A prior that takes these for roughly right.
        """
        logs_N: dict[Quantity, Floats] = {
            quantity: np.log(np.maximum(of_N - bound_N, np.maximum(_LEAST_SHARE * bound_N, _LEAST[quantity])))
            for quantity, (of_N, bound_N) in expected.items()
        }
        return Prior(
            logs_N={**self.logs_N, **logs_N},
            level={**self.level, **{quantity: _LEVEL[quantity] for quantity in expected}},
            spread={**self.spread, **{quantity: _SPREAD[quantity] for quantity in expected}},
            matters_D=matters_D,
        )

    @property
    def tells(self) -> bool:
        """True if anything in particular is expected."""
        return any(self.level[quantity] < _UNKNOWN_LEVEL for quantity in _OF_NEED)


class Beliefs:
    """Expectations of all combinations after some estimates.

    Args:
        choices_ND: the index of a choice for each dimension.
        prior: what to expect before any estimate.

    Attributes:
        matters_D: for each dimension, whether anything is expected to change with it.
    """

    def __init__(self, choices_ND: Ints, prior: Prior) -> None:
        sizes = choices_ND.max(axis=0, initial=0) + 1
        offsets = np.cumsum(sizes) - sizes
        self._places_ND = choices_ND + offsets
        self._num_features = int(sizes.sum()) + 1
        self._prior = prior
        self.matters_D = np.ones(len(sizes), bool) if prior.matters_D is None else prior.matters_D
        self._kind_N = choices_ND[:, self.matters_D] @ weights_of(choices_ND[:, self.matters_D])
        self._share_F = np.append(np.repeat(np.where(self.matters_D, 1.0, _OF_IDLE), sizes), 1.0)
        self._seen: list[int] = []
        self._logs: dict[Quantity, list[float]] = {quantity: [] for quantity in get_args(Quantity)}

    @property
    def knows(self) -> bool:
        """True if there is a prior expectation or an estimate to go by."""
        return bool(self._seen) or self._prior.tells

    def is_new(self, places: Ints) -> Bools:
        """Return for which of them nothing was estimated that has the same choices except those that do not matter."""
        return ~np.isin(self._kind_N[places], self._kind_N[self._seen])

    def learn(self, place: int, excess: Mapping[Quantity, float]) -> None:
        """Add one estimate, by the excess over its bounds, and its effort."""
        self._seen.append(place)
        for quantity, value in excess.items():
            self._logs[quantity].append(float(np.log(max(value, _LEAST[quantity]))))

    def expected(self, place: int) -> dict[Quantity, float]:
        """Return the excess over each bound expected of one combination, and its effort, once something is known."""
        places = np.array([place])
        return {quantity: float(self.excess(places, quantity)[0]) for quantity in get_args(Quantity)}

    def excess(self, places: Ints, quantity: Quantity) -> Floats:
        """Return the excess over a bound expected of some combinations, or their effort, once something is known."""
        return np.exp(self._posterior(places, quantity)[0])

    def chance(self, places: Ints, *, spare_device_bytes: Floats, spare_host_bytes: Floats) -> Floats:
        """Return the probability that each of some combinations fits.

        Args:
            places: their indices.
            spare_device_bytes: what the limit leaves each above its bound; infinite without a limit.
            spare_host_bytes: likewise.

        Returns:
            The probabilities; zeros if nothing is known.
        """
        if not self.knows:
            return np.zeros(len(places))
        on_device = self._chance(places, "device_bytes", spare_device_bytes)
        return on_device * self._chance(places, "host_bytes", spare_host_bytes)

    def improvement(self, places: Ints, seconds: Floats, best_seconds: float | None) -> Floats:
        """Return how much faster each of some combinations is expected to be, once something is known.

        Args:
            places: their indices.
            seconds: lower bound of each.
            best_seconds: seconds of the best so far; None if nothing fits yet: more than any is expected to take.

        Returns:
            Expected improvement, as a share of the best.
        """
        excess, spread = self._posterior(places, "seconds")
        expected = seconds + np.exp(excess)
        target = float(expected.max() * 1.5) if best_seconds is None else best_seconds
        # The spread of the logarithm of the whole: the bound is certain.
        spread = np.maximum(1e-3, spread * np.exp(excess) / expected)
        return _expected_improvement((np.log(target) - np.log(expected)), spread)

    def chance_within(self, places: Ints, seconds: Floats, most_seconds: float) -> Floats:
        """Return the probability that each of some combinations takes no longer than a limit, once something is known.

        Args:
            places: their indices.
            seconds: lower bound of each.
            most_seconds: the limit.
        """
        excess, spread = self._posterior(places, "seconds")
        spare = np.maximum(most_seconds - seconds, _LEAST["seconds"])
        return _normal_cdf((np.log(spare) - excess) / spread)

    def _features(self, places: Ints) -> Floats:
        features = np.zeros((len(places), self._num_features))
        features[:, -1] = 1.0
        np.put_along_axis(features, self._places_ND[places], 1.0, axis=1)
        return features

    def _posterior(self, places: Ints, quantity: Quantity) -> tuple[Floats, Floats]:
        """Return mean and standard deviation of the logarithm."""
        prior, noise = self._prior, _NOISE[quantity]
        logs_N = prior.logs_N[quantity]
        features_NF = self._features(places)
        seen_MF = self._features(np.array(self._seen, dtype=np.int64))
        variance_F = (prior.spread[quantity] * self._share_F) ** 2
        variance_F[-1] = prior.level[quantity] ** 2
        precision_FF = seen_MF.T @ seen_MF / noise**2 + np.diag(1 / variance_F)
        covariance_FF = np.linalg.inv(precision_FF)
        surprise_M = np.array(self._logs[quantity]) - logs_N[self._seen]
        weights_F = covariance_FF @ (seen_MF.T @ surprise_M) / noise**2
        variance_N = np.einsum("nf,nf->n", features_NF @ covariance_FF, features_NF)
        return logs_N[places] + features_NF @ weights_F, np.sqrt(variance_N + noise**2)

    def _chance(self, places: Ints, quantity: Quantity, spare: Floats) -> Floats:
        """Return the probabilities that a need stays within what is available; a likely one counts as certain.

        Otherwise a machine's free memory, even if hardly any of it is used, would decide what is estimated next.
        """
        if np.isinf(spare).all():
            return np.ones(len(spare))
        mean, spread = self._posterior(places, quantity)
        chance = _normal_cdf((np.log(np.maximum(spare, 1.0)) - mean) / spread)
        return np.where(chance > _LIKELY, 1.0, chance)


def weights_of(choices_ND: Ints) -> Ints:
    """Return the weight of each dimension in a number of which each combination of choices has one of its own."""
    return np.cumprod([1, *(choices_ND.max(axis=0, initial=0) + 1)], dtype=np.int64)[:-1]


def _expected_improvement(gap: Floats, spread: Floats) -> Floats:
    """Return the expected improvement of a normal variable whose mean is below the target by ``gap``."""
    z = gap / spread
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    return np.maximum(0.0, gap * _normal_cdf(z) + spread * density)


def _normal_cdf(z: Floats) -> Floats:
    """Return an approximation to a hundredth, by the logistic curve; the result is only compared."""
    return 1 / (1 + np.exp(-1.702 * np.clip(z, -30, 30)))
