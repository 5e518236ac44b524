"""A plan, and the reasons for it, from the results of its search."""

from __future__ import annotations

from collections.abc import Sequence

from lowmem_ft.planning.planner.memory_plan import Counts, MemoryPlan
from lowmem_ft.planning.planner.search.estimated_needs import Limits, Need
from lowmem_ft.planning.planner.search.neighbours import Neighbours
from lowmem_ft.planning.planner.search.search_findings import Findings
from lowmem_ft.recipe.space.search_space import words_of


def nearest(needs: Sequence[tuple[int, Need]], limits: Limits) -> int | None:
    """Return the index of the one that lacks the fewest bytes in all; None if there are no needs."""
    return min(
        needs,
        key=lambda item: (sum(limits.missing(item[1].device_bytes, item[1].host_bytes)), item[0]),
        default=(None, None),
    )[0]


def explained(findings: Findings, neighbours: Neighbours) -> MemoryPlan:
    """Return the best that a search has found, or the nearest to fitting, with the reasons."""
    found, space = findings.found, findings.space
    best = found.best if found.best is not None else nearest(list(found.needs.items()), findings.limits)
    assert best is not None, "at least one estimate was made"
    need = found.needs[best]
    over_device, over_host = findings.limits.missing(need.device_bytes, need.host_bytes)
    chosen = need.recipe or space.recipe_of(space.combinations[best])
    return MemoryPlan(
        recipe=chosen,
        estimate=need.estimate,
        fits=need.fits,
        overrides=findings.changes(best),
        alternatives=findings.alternatives(),
        rejected=findings.rejected(),
        knobs=neighbours.knobs(findings) if need.fits else (),
        purchases=findings.purchases(),
        binds=findings.binds(),
        counts=Counts(
            estimated=len(found.needs),
            refused=sum(space.refused.values()) + len(found.refused),
            beyond_bytes=found.beyond_bytes,
            beyond_seconds=found.beyond_seconds,
            left=found.left,
        ),
        left_seconds=found.left_seconds,
        interrupted=found.interrupted,
        missing_device_bytes=over_device,
        missing_host_bytes=over_host,
        given_up=tuple(word for word in space.recipe.plan.allow if word in words_of(space.recipe, chosen)),
    )
