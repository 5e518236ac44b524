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

_OF_NEED: tuple[Quantity, ...] = ("seconds", "device_bytes", "host_bytes")

_SPREAD: dict[Quantity, float] = {"seconds": 0.3, "device_bytes": 0.7, "host_bytes": 0.3, "effort": 0.7}
"""How far a choice is thought to move the logarithm, as a standard deviation."""

_NOISE: dict[Quantity, float] = {"seconds": 0.02, "device_bytes": 0.1, "host_bytes": 0.02, "effort": 0.2}
"""What the sum over choices leaves out, likewise: seconds add up nearly, a peak lies now here, now there."""

_LIKELY = 0.9

_LEAST: dict[Quantity, float] = {
    "seconds": 1e-4,
    "device_bytes": 2.0**20,
    "host_bytes": 2.0**20,
    "effort": 1.0,
}
"""Below this, what a bound is exceeded by counts as nothing."""


@dataclass(frozen=True, kw_only=True)
class Prior:
    """What each choice is expected to do to the logarithm, before anything is known; of each dimension a list."""

    seconds: tuple[tuple[float, ...], ...]
    device_bytes: tuple[tuple[float, ...], ...]
    host_bytes: tuple[tuple[float, ...], ...]

    @staticmethod
    def flat(sizes: tuple[int, ...]) -> Prior:
        """Nothing is expected of dimensions with so many choices each."""
        nothing = tuple((0.0,) * size for size in sizes)
        return Prior(seconds=nothing, device_bytes=nothing, host_bytes=nothing)


class Beliefs:
    """What is believed of all combinations after some estimates.

    Args:
        choices_ND: the index of a choice for each dimension.
        prior: what to expect.
    """

    def __init__(self, choices_ND: Ints, prior: Prior) -> None:
        sizes = [len(of_dimension) for of_dimension in prior.seconds]
        offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64) if sizes else np.zeros(0, int)
        self._places_ND = choices_ND + offsets
        self._num_features = sum(sizes) + 1
        self._mean_F: dict[Quantity, Floats] = {"effort": np.zeros(self._num_features)}
        for quantity in _OF_NEED:
            of_choices = [value for row in getattr(prior, quantity) for value in row]
            self._mean_F[quantity] = np.array([*of_choices, 0.0])
        self._seen: list[int] = []
        self._logs: dict[Quantity, list[float]] = {quantity: [] for quantity in get_args(Quantity)}

    def learn(self, place: int, excess: Mapping[Quantity, float]) -> None:
        """Take over one estimate, by what it exceeds its bounds by, and its effort."""
        self._seen.append(place)
        for quantity, value in excess.items():
            self._logs[quantity].append(float(np.log(max(value, _LEAST[quantity]))))

    def expected(self, place: int) -> dict[Quantity, float]:
        """What one is expected to exceed its bounds by, and its effort, once something is known."""
        features = self._features(np.array([place]))
        return {
            quantity: float(np.exp(self._posterior(features, quantity)[0][0]))
            for quantity in get_args(Quantity)
        }

    def promise(
        self,
        places: Ints,
        *,
        best_seconds: float | None,
        seconds: Floats,
        spare_device_bytes: Floats,
        spare_host_bytes: Floats,
    ) -> Floats:
        """How much is to be hoped for of each of some combinations.

        Args:
            places: their indices.
            best_seconds: of the best so far; None if nothing fits yet.
            seconds: what each takes at least.
            spare_device_bytes: what the limit leaves each beyond its bound; infinite without one.
            spare_host_bytes: likewise.

        Returns:
            Expected improvement, as a share of the best, times the chance that it fits; that chance alone where no
            clock tells seconds, so that nothing is faster than the best.
        """
        if not self._seen:
            return np.zeros(len(places))
        features_NF = self._features(places)
        fits = self._chance(features_NF, "device_bytes", spare_device_bytes)
        fits = fits * self._chance(features_NF, "host_bytes", spare_host_bytes)
        if best_seconds == 0:
            return fits
        excess, spread = self._posterior(features_NF, "seconds")
        expected = seconds + np.exp(excess)
        target = float(expected.max() * 1.5) if best_seconds is None else best_seconds
        # The spread of the logarithm of the whole: the bound is certain.
        spread = np.maximum(1e-3, spread * np.exp(excess) / expected)
        return fits * _expected_improvement((np.log(target) - np.log(expected)), spread)

    def effort(self, places: Ints) -> Floats:
        """What estimates of some combinations are expected to take, in common ones."""
        if not self._seen:
            return np.ones(len(places))
        return np.exp(self._posterior(self._features(places), "effort")[0])

    def _features(self, places: Ints) -> Floats:
        features = np.zeros((len(places), self._num_features))
        features[:, -1] = 1.0
        np.put_along_axis(features, self._places_ND[places], 1.0, axis=1)
        return features

    def _posterior(self, features_NF: Floats, quantity: Quantity) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the logarithm."""
        seen_MF = self._features(np.array(self._seen))
        prior_F, variance_F = self._mean_F[quantity], np.full(self._num_features, _SPREAD[quantity] ** 2)
        variance_F[-1] = 1e3  # nothing is known of the level
        noise = _NOISE[quantity]
        precision_FF = seen_MF.T @ seen_MF / noise**2 + np.diag(1 / variance_F)
        covariance_FF = np.linalg.inv(precision_FF)
        surprise_M = np.array(self._logs[quantity]) - seen_MF @ prior_F
        weights_F = prior_F + covariance_FF @ (seen_MF.T @ surprise_M) / noise**2
        variance_N = np.einsum("nf,nf->n", features_NF @ covariance_FF, features_NF)
        return features_NF @ weights_F, np.sqrt(variance_N + noise**2)

    def _chance(self, features_NF: Floats, quantity: Quantity, spare: Floats) -> Floats:
        """That a need stays within what there is; what is likely counts as certain.

        Else what a machine happens to have free, far from being used, would decide what is asked next.
        """
        if np.isinf(spare).all():
            return np.ones(len(spare))
        mean, spread = self._posterior(features_NF, quantity)
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
