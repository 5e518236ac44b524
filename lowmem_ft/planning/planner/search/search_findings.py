"""Results of a search as settings: what fits and what does not, what binds, and what more memory would buy."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Literal

from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.planning.planner.memory_plan import Binding, Choice, Purchase, Rejected
from lowmem_ft.planning.planner.rows_per_gpu import DEALT
from lowmem_ft.planning.planner.search.best_found import NEARLY_AS_FAST
from lowmem_ft.planning.planner.search.candidates import Candidates
from lowmem_ft.planning.planner.search.estimated_needs import Limits, Need, Searched
from lowmem_ft.planning.planner.search.search import Search
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.space.search_space import Space

MOST_ALTERNATIVES = 4
MOST_REJECTED = 8


@dataclass(frozen=True, kw_only=True)
class Findings:
    """A search, and the recipe, search space and limits that it was for.

    Args:
        asked: the recipe that the plan is for; the space's recipe may share its rows among several GPUs.
    """

    asked: Recipe
    space: Space
    candidates: Candidates
    limits: Limits
    found: Searched

    @staticmethod
    def of(search: Search, space: Space, limits: Limits, asked: Recipe) -> Findings:
        """Return what a search has found so far."""
        return Findings(
            asked=asked, space=space, candidates=search.candidates, limits=limits, found=search.conclude()
        )

    def changes(self, place: int) -> dict[str, Any]:
        """Return the settings of a combination that differ from the user's recipe."""
        need = self.found.needs.get(place)
        changed = need.recipe if need is not None else None
        changed = changed or self.space.recipe_of(self.space.combinations[place])
        keys = (*DEALT, *(key for dimension in self.space.dimensions for key in dimension.keys))
        values = {key: operator.attrgetter(key)(changed) for key in keys}
        return {key: value for key, value in values.items() if value != operator.attrgetter(key)(self.asked)}

    def choice(self, place: int) -> Choice:
        """Return a combination with what it needs."""
        estimate: MemoryEstimate = self.found.needs[place].estimate
        return Choice(
            overrides=self.changes(place),
            device_bytes=estimate.process_high_bytes,
            host_bytes=estimate.host_peak_bytes,
            step_seconds=None if estimate.step is None else estimate.step.seconds,
        )

    @property
    def best_seconds(self) -> float:
        """Seconds per step of the best combination; 0 if nothing fits or the device has no timing model."""
        best = self.found.best
        return 0.0 if best is None else self.found.needs[best].seconds

    def reason(self, need: Need) -> str:
        """Return why an estimated combination does not fit; empty if it does."""
        if need.fits:
            return ""
        over_device, over_host = self.limits.missing(need.device_bytes, need.host_bytes)
        parts = [
            f"{format_bytes(over)} too much for the {where}"
            for over, where in ((over_device, "device"), (over_host, "host"))
            if over
        ]
        return " and ".join(parts) or "the caching allocator runs out of memory"

    @property
    def _faster(self) -> list[int]:
        """Estimated combinations that do not fit and would be faster by more than ``NEARLY_AS_FAST``."""
        found, best = self.found, self.found.best
        return [
            place
            for place, need in found.needs.items()
            if not need.fits
            and (best is None or need.seconds * (1 + NEARLY_AS_FAST) < found.needs[best].seconds)
        ]

    def fitting(self) -> list[int]:
        """Return the estimated combinations that fit, the fastest first."""
        return sorted(
            (place for place, need in self.found.needs.items() if need.fits),
            key=lambda place: (self.found.needs[place].seconds, int(self.candidates.after_N[place])),
        )

    def alternatives(self) -> tuple[Choice, ...]:
        """Return others that fit: each is slower, and needs less device or host memory than all faster ones."""
        kept: list[int] = []
        for place in self.fitting():
            need = self.found.needs[place]
            others = [self.found.needs[other] for other in kept]
            is_leaner = all(need.device_bytes < other.device_bytes for other in others) or all(
                need.host_bytes < other.host_bytes for other in others
            )
            if not kept or is_leaner:
                kept.append(place)
        return tuple(self.choice(place) for place in kept if place != self.found.best)[:MOST_ALTERNATIVES]

    def rejected(self) -> tuple[Rejected, ...]:
        """Return the estimated combinations that do not fit, the nearest first, then those that cannot be built."""
        needs = self.found.needs
        missing = {
            place: sum(self.limits.missing(need.device_bytes, need.host_bytes))
            for place, need in needs.items()
            if not need.fits
        }
        nearest = sorted(missing, key=lambda place: (missing[place], place))
        rejected = [
            Rejected(overrides=self.changes(place), reason=self.reason(needs[place])) for place in nearest
        ]
        rejected += [
            Rejected(overrides=self.changes(place), reason=why) for place, why in self.found.refused.items()
        ]
        return tuple(rejected[:MOST_REJECTED])

    def binds(self) -> tuple[Binding, ...]:
        """Return the kinds of memory that the faster combinations lack; ``time`` if there are no faster ones."""
        over = [
            self.limits.missing(self.found.needs[place].device_bytes, self.found.needs[place].host_bytes)
            for place in self._faster
        ]
        binding: list[Binding] = []
        if any(device for device, _ in over):
            binding.append("device")
        if any(host for _, host in over):
            binding.append("host")
        return tuple(binding) or ("time",)

    def purchases(self) -> tuple[Purchase, ...]:
        """Return the least extra device and host memory that makes a step faster, at most as much as there is."""
        return tuple(purchase for of in ("device", "host") if (purchase := self._purchase(of)) is not None)

    def _purchase(self, of: Literal["device", "host"]) -> Purchase | None:
        if self.found.best is None:
            return None
        there = self.limits.device_bytes if of == "device" else self.limits.host_bytes
        offers = []
        for place in self._faster:
            need = self.found.needs[place]
            device, host = self.limits.missing(need.device_bytes, need.host_bytes)
            extra, other = (device, host) if of == "device" else (host, device)
            if 0 < extra <= there and not other:
                offers.append((extra, need.seconds, place))
        if not offers:
            return None
        extra, seconds, place = min(offers)
        return Purchase(of=of, extra_bytes=extra, step_seconds=seconds, overrides=self.changes(place))
