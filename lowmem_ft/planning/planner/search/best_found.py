"""The best of what a search has estimated: the simplest of those nearly as fast as the fastest.

Axes: N combinations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from lowmem_ft.planning.planner.search.candidates import Bools, Candidates
from lowmem_ft.planning.planner.search.estimated_needs import Searched

NEARLY_AS_FAST = 0.005
"""Share of the fastest's seconds by which the best may be slower, if it is simpler."""


def by_speed(candidates: Candidates, found: Searched, place: int) -> tuple[int, float, int]:
    """Return the key that sorts estimated combinations from the fastest, no two of them alike."""
    return int(candidates.before_N[place]), found.needs[place].seconds, int(candidates.after_N[place])


def simplest(candidates: Candidates, found: Searched) -> int:
    """Return the best of those that fit; the fastest if the device has no timing model."""
    assert found.fastest is not None, "something fits"
    before, seconds, _ = by_speed(candidates, found, found.fastest)
    if not seconds:
        return found.fastest
    alike = [
        place
        for place, need in found.needs.items()
        if need.fits
        and candidates.before_N[place] == before
        and need.seconds <= (1 + NEARLY_AS_FAST) * seconds
    ]
    return _no_slower_than_with_less(candidates, found, alike)


def _no_slower_than_with_less(candidates: Candidates, found: Searched, alike: Sequence[int]) -> int:
    """Return the simplest of some that are nearly as fast, but none slower than the choice with less memory.

    Over the pairs of device and host memory that two of them need, from the least up, the choice only gets faster.
    """
    needs, chosen = found.needs, dict[tuple[int, int], int]()
    devices = sorted({needs[place].device_bytes for place in alike})
    hosts = sorted({needs[place].host_bytes for place in alike})
    for corner in itertools.product(range(len(devices)), range(len(hosts))):
        device, host = corner
        with_less = (chosen.get((device - 1, host)), chosen.get((device, host - 1)))
        most = min((needs[place].seconds for place in with_less if place is not None), default=math.inf)
        there = [
            place
            for place in alike
            if needs[place].device_bytes <= devices[device]
            and needs[place].host_bytes <= hosts[host]
            and needs[place].seconds <= most
        ]
        if there:
            chosen[corner] = min(
                there,
                key=lambda place: (int(candidates.changes_N[place]), *by_speed(candidates, found, place)),
            )
    return chosen[len(devices) - 1, len(hosts) - 1]


def may_be_better(candidates: Candidates, found: Searched) -> Bools:
    """Return which of all might be faster, or simpler and nearly as fast, if they took their least seconds."""
    assert found.fastest is not None, "something fits"
    assert found.best is not None, "something fits"
    before, seconds, _ = by_speed(candidates, found, found.fastest)
    _, of_best, after = by_speed(candidates, found, found.best)
    bound_N = candidates.seconds_N
    better_N = (bound_N < of_best) | ((bound_N == of_best) & (candidates.after_N < after))
    if seconds:
        is_simple_N = candidates.changes_N < candidates.changes_N[found.best]
        better_N |= is_simple_N & (bound_N <= (1 + NEARLY_AS_FAST) * seconds)
    return (candidates.before_N < before) | ((candidates.before_N == before) & better_N)
