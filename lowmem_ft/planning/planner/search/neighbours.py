"""Combinations next to the best of a search, and why each is not chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.planning.planner.memory_plan import NOT_ESTIMATED, KnobChoice, typed
from lowmem_ft.planning.planner.search.estimated_needs import Need
from lowmem_ft.planning.planner.search.search import Search
from lowmem_ft.planning.planner.search.search_findings import Findings
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.space.search_space import Combination, Space


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
            assert looked_at is not None, "something fits"
            places = [self.place_of(combination) for combination in self._next_cheaper()]
            open_ = [place for place in places if place is not None and self._search.is_open(place)]
            worth_it = self._search.worth_it(open_, looked_at)
            for number, place in enumerate(worth_it, 1):
                self._search.estimate(place, then=worth_it[number:])

    def knobs(self, findings: Findings) -> tuple[KnobChoice, ...]:
        """Return, for each knob of the best, the reason against the next cheaper value."""
        rows = (
            self._knob(findings, place, combination) if combination else self._one_more(findings, place)
            for place, combination in enumerate(self._next_cheaper(each=True))
        )
        return tuple(row for row in rows if row is not None)

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
        other = self.place_of(combination)
        need = None if other is None else findings.found.needs.get(other)
        changed: dict[str, Any] = {}
        for each, old, new in zip(self._space.dimensions, chosen, combination, strict=True):
            if old != new and each.is_counted and not new:
                changed |= {key: _number_of(key, need) or 1 for key in each.keys}
            elif old != new:
                changed |= each.choices[new]
        return KnobChoice(
            setting=" ".join(typed(dimension.choices[chosen[place]])),
            cheaper=" ".join(typed(changed)),
            reason=self._against(findings, combination),
        )

    def _one_more(self, findings: Findings, place: int) -> KnobChoice | None:
        """Return why the best does not take one more layer; None if not known, or no number of layers."""
        best, dimension = self._search.found.best, self._space.dimensions[place]
        need = None if best is None else findings.found.needs[best]
        if need is None or need.one_more is None or not dimension.is_counted:
            return None
        (key,) = dimension.keys
        number, more = _number_of(key, need), _number_of(key, need.one_more)
        if number == more:
            return None
        return KnobChoice(
            setting=" ".join(typed({key: number})),
            cheaper=" ".join(typed({key: more})),
            reason=("" if need.one_more.estimate else "at least ") + findings.reason(need.one_more),
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


def _number_of(key: str, need: Need | None) -> int:
    """Return the number of layers that some needs are of; 0 without any."""
    return 0 if need is None or need.recipe is None else recipe_keys()[key].value_in(need.recipe)


def _slower(seconds: float, best_seconds: float) -> str:
    if not best_seconds:
        return "fits too, with more or costlier changes"
    if seconds < best_seconds:
        return f"fits too, with more changes: {seconds:.4g} s against {best_seconds:.4g}"
    if seconds == best_seconds:
        return "fits too, and is no faster"
    return f"fits too, and is slower: {seconds:.4g} s against {best_seconds:.4g}"
