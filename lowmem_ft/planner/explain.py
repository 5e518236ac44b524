"""Explanation of a plan, from the results of its search."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.memory.memory_estimate import MemoryEstimate
from lowmem_ft.planner.memory_plan import (
    NOT_ESTIMATED,
    Binding,
    Choice,
    KnobChoice,
    Purchase,
    Rejected,
    typed,
)
from lowmem_ft.planner.rows_per_gpu import DEALT
from lowmem_ft.planner.search import NEARLY_AS_FAST, Candidates, Limits, Need, Search, Searched
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.space.search_space import Combination, Space

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
        changed = self.space.recipe_of(self.space.combinations[place])
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


class Neighbours:
    """Combinations that differ from the best in one knob, by a value that needs more memory.

    If a rule refuses that value together with the others, one more knob differs: all rows in a single micro-batch leave
    nothing for vertical order, so the neighbour has horizontal order too.

    Args:
        space: the search space.
        search: estimates what is not known yet.
    """

    def __init__(self, space: Space, search: Search) -> None:
        self._space = space
        self._search = search
        self._places = {combination: place for place, combination in enumerate(space.combinations)}

    def place_of(self, combination: Combination) -> int | None:
        """Return the index of a combination; None if a rule refuses it."""
        return self._places.get(combination)

    def look_around(self) -> None:
        """Estimate the neighbours of the best, until none of them is better.

        Includes those that differ in one more choice, which a rule ties to the first.
        """
        looked_at = None
        while self._search.found.best != looked_at:
            self._search.look_around()
            looked_at = self._search.found.best
            places = [self.place_of(combination) for combination in self._next_cheaper()]
            open_ = [place for place in places if place is not None and self._search.is_open(place)]
            for number, place in enumerate(open_, 1):
                self._search.estimate(place, then=open_[number:])

    def knobs(self, findings: Findings) -> tuple[KnobChoice, ...]:
        """Return, for each knob of the best, the reason against the next cheaper value."""
        return tuple(
            self._knob(findings, place, combination)
            for place, combination in enumerate(self._next_cheaper(each=True))
            if combination
        )

    def _next_cheaper(self, *, each: bool = False) -> Iterator[Combination]:
        """Yield each dimension's next cheaper combination; with ``each``, an empty one if nothing is cheaper."""
        best = self._search.found.best
        chosen = () if best is None else self._space.combinations[best]
        for place, index in enumerate(chosen):
            if index > 0:
                cheaper = (*chosen[:place], index - 1, *chosen[place + 1 :])
                yield cheaper if cheaper in self._places else self._with_what_is_tied(cheaper, place)
            elif each:
                yield ()

    def _with_what_is_tied(self, refused: Combination, changed: int) -> Combination:
        """Return it with one more change, the fastest that ends the refusal; unchanged if no single change does."""
        candidates = self._search.candidates
        differs_ND = candidates.choices_ND != np.array(refused)
        mended = np.flatnonzero((differs_ND.sum(axis=1) == 1) & ~differs_ND[:, changed])
        if not len(mended):
            return refused
        order = np.lexsort(
            (candidates.after_N[mended], candidates.seconds_N[mended], candidates.before_N[mended])
        )
        return self._space.combinations[mended[order[0]]]

    def _knob(self, findings: Findings, place: int, combination: Combination) -> KnobChoice:
        best = self._search.found.best
        assert best is not None, "neighbours need a best plan"
        dimension, chosen = self._space.dimensions[place], self._space.combinations[best]
        changed = [
            setting
            for each, old, new in zip(self._space.dimensions, chosen, combination, strict=True)
            if old != new
            for setting in typed(each.choices[new])
        ]
        return KnobChoice(
            setting=" ".join(typed(dimension.choices[chosen[place]])),
            cheaper=" ".join(changed),
            reason=self._against(findings, combination),
        )

    def _against(self, findings: Findings, combination: Combination) -> str:
        place = self.place_of(combination)
        if place is None:
            return self._space.refusal(combination) or "not supported by the device or the model"
        found, candidates = findings.found, findings.candidates
        if place in found.refused:
            return found.refused[place]
        if place in found.needs:
            need = found.needs[place]
            return findings.reason(need) or _slower(need.seconds, findings.best_seconds)
        over_device, over_host = findings.limits.missing(
            float(candidates.device_bytes_N[place]), float(candidates.host_bytes_N[place])
        )
        parts = [
            f"at least {format_bytes(over)} too much for the {where}"
            for over, where in ((over_device, "device"), (over_host, "host"))
            if over
        ]
        if parts:
            return " and ".join(parts)
        if not self._search.is_open(place):
            return (
                f"takes {candidates.seconds_N[place]:.3g} s at least"
                if findings.best_seconds
                else "another change, whose gain cannot be timed on this device"
            )
        return NOT_ESTIMATED


def _slower(seconds: float, best_seconds: float) -> str:
    if not best_seconds:
        return "fits too, with more or costlier changes"
    if seconds < best_seconds:
        return f"fits too, with more changes: {seconds:.4g} s against {best_seconds:.4g}"
    if seconds == best_seconds:
        return "fits too, and is no faster"
    return f"fits too, and is slower: {seconds:.4g} s against {best_seconds:.4g}"


def nearest(needs: Sequence[tuple[int, Need]], limits: Limits) -> int | None:
    """Return the index of the one that lacks the fewest bytes in all; None if there are no needs."""
    return min(
        needs,
        key=lambda item: (sum(limits.missing(item[1].device_bytes, item[1].host_bytes)), item[0]),
        default=(None, None),
    )[0]
