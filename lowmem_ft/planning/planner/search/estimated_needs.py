"""Needs of combinations, as estimated, and the memory that there is for them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.memory.uncertainty import with_headroom
from lowmem_ft.recipe import Recipe


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
        recipe: what was estimated, with the number of last layers that was found to fit; None: not of a recipe.
        least: needs with none of these layers; None: the same.
        one_more: needs with one more of these layers than fit; None: not asked for, or there is no other layer.
    """

    seconds: float
    device_bytes: float
    host_bytes: float
    fits: bool
    effort: float = 1.0
    estimate: Any = None
    recipe: Recipe | None = None
    least: Need | None = None
    one_more: Need | None = None


def need_from(estimate: MemoryEstimate, effort: float = 1.0, recipe: Recipe | None = None) -> Need:
    """Return the needs by an estimate, with the headroom that keeps it from being a tight fit.

    Args:
        estimate: estimate of one combination.
        effort: effort of making it, in common estimates; each counts as at least one.
        recipe: what was estimated.
    """
    peak, high_bytes = with_headroom(estimate.process_peak_bytes), estimate.process_high_bytes
    host = with_headroom(estimate.host_peak_bytes)
    return Need(
        seconds=0.0 if estimate.step is None else estimate.step.seconds,
        device_bytes=max(peak, high_bytes),
        host_bytes=max(host, high_bytes) if estimate.is_of_cpu else host,
        fits=estimate.fits and not estimate.tight,
        effort=max(1.0, effort),
        estimate=estimate,
        recipe=recipe,
    )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The bytes available; infinite if there is no limit."""

    device_bytes: float = float("inf")
    host_bytes: float = float("inf")

    def missing(self, device_bytes: float, host_bytes: float) -> tuple[int, int]:
        """Return the bytes missing on the device and on the host; with as many more it would fit."""
        over = device_bytes - self.device_bytes, host_bytes - self.host_bytes
        return math.ceil(max(0.0, over[0])), math.ceil(max(0.0, over[1]))

    def room(self, need: Need) -> float:
        """Return the bytes that some needs leave of device or host memory, whichever has less left."""
        return min(self.device_bytes - need.device_bytes, self.host_bytes - need.host_bytes)


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
