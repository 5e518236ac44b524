"""The prospects of combinations that have not been estimated: to fit, to be faster, and what they should need.

Axes: N combinations, D dimensions.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np

from lowmem_ft.planning.planner.search.best_found import NEARLY_AS_FAST
from lowmem_ft.planning.planner.search.candidates import Bools, Candidates, Floats, Ints
from lowmem_ft.planning.planner.search.estimated_needs import Limits, Need
from lowmem_ft.planning.planner.search.ranking import Beliefs


@dataclass(frozen=True)
class Prospects:
    """The prospects of combinations, by their bounds and by what a search has learnt.

    Args:
        candidates: the combinations.
        limits: the memory available.
        beliefs: what estimates should exceed the bounds by; it learns from each.
    """

    candidates: Candidates
    limits: Limits
    beliefs: Beliefs

    @property
    def knows(self) -> bool:
        """True if there is something to go by."""
        return self.beliefs.knows

    def learn(self, place: int, need: Need) -> None:
        """Take in the needs of one, as estimated: whether it fits is decided by the bytes of the fewest layers."""
        candidates, least = self.candidates, need.least or need
        self.beliefs.learn(
            place,
            {
                "seconds": need.seconds - candidates.seconds_N[place],
                "device_bytes": least.device_bytes - candidates.device_bytes_N[place],
                "host_bytes": least.host_bytes - candidates.host_bytes_N[place],
                "effort": need.effort,
            },
        )

    def copied(self) -> Prospects:
        """Return the same prospects, from which others may be learnt."""
        return replace(self, beliefs=copy.deepcopy(self.beliefs))

    def missing(self, places: Ints) -> Floats:
        """Return the bytes of device and host that each should lack."""
        candidates, limits = self.candidates, self.limits
        device_N = candidates.device_bytes_N[places] + self.beliefs.excess(places, "device_bytes")
        host_N = candidates.host_bytes_N[places] + self.beliefs.excess(places, "host_bytes")
        missing_N = np.maximum(0.0, device_N - limits.device_bytes)
        missing_N += np.maximum(0.0, host_N - limits.host_bytes)
        return missing_N

    def chance(self, places: Ints) -> Floats:
        """Return the probability that each fits."""
        candidates, limits = self.candidates, self.limits
        return self.beliefs.chance(
            places,
            spare_device_bytes=limits.device_bytes - candidates.device_bytes_N[places],
            spare_host_bytes=limits.host_bytes - candidates.host_bytes_N[places],
        )

    def promise(self, places: Ints, best_seconds: float | None) -> Floats:
        """Return the expected gain of each, as a share of the best; the chance to fit alone without a timing model."""
        chance = self.chance(places)
        if best_seconds == 0 or not self.beliefs.knows:
            return chance
        return chance * self.beliefs.improvement(places, self.candidates.seconds_N[places], best_seconds)

    def chance_to_be_alike(self, places: Ints, fastest_seconds: float) -> Floats:
        """Return the probability that each fits and is nearly as fast as the fastest."""
        chance, most = self.chance(places), (1 + NEARLY_AS_FAST) * fastest_seconds
        return chance * self.beliefs.chance_within(places, self.candidates.seconds_N[places], most)

    def worthiest(self, places: Ints, promise: Floats) -> int:
        """Return the one with the most promise per effort."""
        candidates, worth = self.candidates, promise / self.beliefs.excess(places, "effort")
        order = np.lexsort((candidates.after_N[places], candidates.before_N[places], -worth))
        return int(places[order[0]])

    def near(self, best: int, places: Ints, promise: Floats, least_promise: float) -> Bools:
        """Return those that differ from the best in one choice; if they promise nothing, in two, and so on.

        Small changes are well predicted from what has been estimated, and show what each choice does. Choices that are
        expected to change nothing do not count.
        """
        distance, _ = self.distances(best, places)
        worth_it = promise >= min(least_promise, float(promise.max()))
        return distance <= distance[worth_it].min()

    def is_new(self, places: Ints) -> Bools:
        """Return for which of them nothing was estimated that has the same choices except those that do not matter."""
        return self.beliefs.is_new(places)

    def distances(self, one: int, places: Ints) -> tuple[Ints, Ints]:
        """Return in how many choices others differ from one: those that matter, and those that should not."""
        differs_ND = self.candidates.choices_ND[places] != self.candidates.choices_ND[one]
        matters_D = self.beliefs.matters_D
        return differs_ND[:, matters_D].sum(axis=1), differs_ND[:, ~matters_D].sum(axis=1)

    def expected(self, place: int) -> Need:
        """Return the needs expected of one combination, by all that is known."""
        candidates, limits = self.candidates, self.limits
        excess = self.beliefs.expected(place)
        device_bytes = float(candidates.device_bytes_N[place] + excess["device_bytes"])
        host_bytes = float(candidates.host_bytes_N[place] + excess["host_bytes"])
        return Need(
            seconds=float(candidates.seconds_N[place] + excess["seconds"]),
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            fits=not any(limits.missing(device_bytes, host_bytes)),
            effort=excess["effort"],
        )
