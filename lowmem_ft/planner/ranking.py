"""What a search expects of combinations it has not estimated: a line through those it has, which only orders them.

The logarithm of what a need exceeds its bound by is taken for a sum over the choices, each with a normal prior; the
posterior is that of Bayesian linear regression. What is promised is the expected improvement times the chance to fit;
what is asked next is what promises most for the effort.

Axes: N combinations, D dimensions, F features (one for each choice of each dimension, and one for all), M estimates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Quantity = Literal["seconds", "device_bytes", "host_bytes", "effort"]

_UNKNOWN_LEVEL = 30.0

_OF_NEED: tuple[Quantity, ...] = ("seconds", "device_bytes", "host_bytes")

_NOISE: dict[Quantity, float] = {"seconds": 0.02, "device_bytes": 0.1, "host_bytes": 0.02, "effort": 0.2}
"""What the sum over choices leaves out, as a standard deviation: seconds add up nearly, a peak moves about."""

_LEVEL: dict[Quantity, float] = {"seconds": 0.3, "device_bytes": 0.5, "host_bytes": 0.3, "effort": 0.5}
"""How far what is expected may be off as a whole, likewise."""

_SPREAD: dict[Quantity, float] = {"seconds": 0.05, "device_bytes": 0.15, "host_bytes": 0.05, "effort": 0.3}
"""How far it may be off for one choice more than for another."""

_LIKELY = 0.9

_LEAST: dict[Quantity, float] = {
    "seconds": 1e-4,
    "device_bytes": 2.0**20,
    "host_bytes": 2.0**20,
    "effort": 1.0,
}
"""Below this, what a bound is exceeded by counts as nothing."""

_LEAST_SHARE = 0.01
"""Of a bound, that it is expected to be exceeded by at the least."""


@dataclass(frozen=True, kw_only=True)
class Prior:
    """What is thought of all combinations before anything is known.

    Args:
        logs_N: logarithm of what each is expected to exceed its bound by.
        level: how far all of them together may be off, as a standard deviation.
        spread: how far a choice is thought to move the logarithm beside that.
    """

    logs_N: Mapping[Quantity, Floats]
    level: Mapping[Quantity, float]
    spread: Mapping[Quantity, float]

    @staticmethod
    def flat(num_combinations: int) -> Prior:
        """Nothing is expected of so many."""
        quantities = get_args(Quantity)
        return Prior(
            logs_N=dict.fromkeys(quantities, np.zeros(num_combinations)),
            level=dict.fromkeys(quantities, _UNKNOWN_LEVEL),
            spread={"seconds": 0.3, "device_bytes": 0.7, "host_bytes": 0.3, "effort": 0.7},
        )

    def expecting(self, expected: Mapping[Quantity, tuple[Floats, Floats]]) -> Prior:
        """With something to expect.

        Args:
            expected: of each combination, and its bound.

        Returns:
            A prior that holds it for about right.
        """
        logs_N: dict[Quantity, Floats] = {
            quantity: np.log(np.maximum(of_N - bound_N, np.maximum(_LEAST_SHARE * bound_N, _LEAST[quantity])))
            for quantity, (of_N, bound_N) in expected.items()
        }
        return Prior(
            logs_N={**self.logs_N, **logs_N},
            level={**self.level, **{quantity: _LEVEL[quantity] for quantity in expected}},
            spread={**self.spread, **{quantity: _SPREAD[quantity] for quantity in expected}},
        )

    @property
    def tells(self) -> bool:
        """Whether anything is expected."""
        return any(self.level[quantity] < _UNKNOWN_LEVEL for quantity in _OF_NEED)


class Beliefs:
    """What is believed of all combinations after some estimates.

    Args:
        choices_ND: the index of a choice for each dimension.
        prior: what to expect.
    """

    def __init__(self, choices_ND: Ints, prior: Prior) -> None:
        sizes = choices_ND.max(axis=0, initial=0) + 1
        offsets = np.cumsum(sizes) - sizes
        self._places_ND = choices_ND + offsets
        self._num_features = int(sizes.sum()) + 1
        self._prior = prior
        self._seen: list[int] = []
        self._logs: dict[Quantity, list[float]] = {quantity: [] for quantity in get_args(Quantity)}

    @property
    def knows(self) -> bool:
        """Whether there is anything to go by."""
        return bool(self._seen) or self._prior.tells

    def learn(self, place: int, excess: Mapping[Quantity, float]) -> None:
        """Take over one estimate, by what it exceeds its bounds by, and its effort."""
        self._seen.append(place)
        for quantity, value in excess.items():
            self._logs[quantity].append(float(np.log(max(value, _LEAST[quantity]))))

    def expected(self, place: int) -> dict[Quantity, float]:
        """What one is expected to exceed its bounds by, and its effort, once something is known."""
        places = np.array([place])
        return {quantity: float(self.excess(places, quantity)[0]) for quantity in get_args(Quantity)}

    def excess(self, places: Ints, quantity: Quantity) -> Floats:
        """What some combinations are expected to exceed a bound by, or their effort, once something is known."""
        return np.exp(self._posterior(places, quantity)[0])

    def chance(self, places: Ints, *, spare_device_bytes: Floats, spare_host_bytes: Floats) -> Floats:
        """How likely each of some combinations fits.

        Args:
            places: their indices.
            spare_device_bytes: what the limit leaves each beyond its bound; infinite without one.
            spare_host_bytes: likewise.

        Returns:
            The chances; zeros where nothing is known.
        """
        if not self.knows:
            return np.zeros(len(places))
        on_device = self._chance(places, "device_bytes", spare_device_bytes)
        return on_device * self._chance(places, "host_bytes", spare_host_bytes)

    def improvement(self, places: Ints, seconds: Floats, best_seconds: float | None) -> Floats:
        """How much faster each of some combinations is expected to be, once something is known.

        Args:
            places: their indices.
            seconds: what each takes at least.
            best_seconds: of the best so far; None if nothing fits yet: more than any is expected to take.

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
        """How likely each of some combinations takes no longer than so many seconds, once something is known.

        Args:
            places: their indices.
            seconds: what each takes at least.
            most_seconds: what is asked about.
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
        """Mean and standard deviation of the logarithm."""
        prior, noise = self._prior, _NOISE[quantity]
        logs_N = prior.logs_N[quantity]
        features_NF = self._features(places)
        seen_MF = self._features(np.array(self._seen, dtype=np.int64))
        variance_F = np.full(self._num_features, prior.spread[quantity] ** 2)
        variance_F[-1] = prior.level[quantity] ** 2
        precision_FF = seen_MF.T @ seen_MF / noise**2 + np.diag(1 / variance_F)
        covariance_FF = np.linalg.inv(precision_FF)
        surprise_M = np.array(self._logs[quantity]) - logs_N[self._seen]
        weights_F = covariance_FF @ (seen_MF.T @ surprise_M) / noise**2
        variance_N = np.einsum("nf,nf->n", features_NF @ covariance_FF, features_NF)
        return logs_N[places] + features_NF @ weights_F, np.sqrt(variance_N + noise**2)

    def _chance(self, places: Ints, quantity: Quantity, spare: Floats) -> Floats:
        """That a need stays within what there is; what is likely counts as certain.

        Else what a machine happens to have free, far from being used, would decide what is asked next.
        """
        if np.isinf(spare).all():
            return np.ones(len(spare))
        mean, spread = self._posterior(places, quantity)
        chance = _normal_cdf((np.log(np.maximum(spare, 1.0)) - mean) / spread)
        return np.where(chance > _LIKELY, 1.0, chance)


def _expected_improvement(gap: Floats, spread: Floats) -> Floats:
    """Of a normal number with a mean below the target by ``gap``."""
    z = gap / spread
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    return np.maximum(0.0, gap * _normal_cdf(z) + spread * density)


def _normal_cdf(z: Floats) -> Floats:
    """To a hundredth, by the logistic curve; it is only compared."""
    return 1 / (1 + np.exp(-1.702 * np.clip(z, -30, 30)))
