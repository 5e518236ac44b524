"""Needs of combinations, as estimated, and the memory that there is for them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


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
