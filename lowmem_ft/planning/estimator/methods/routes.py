"""Routes of a method: shipped recipes and settings of them, in the order of preference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowmem_ft.planning.estimator.methods.settings_ladder import QUARTERS
from lowmem_ft.recipe.gpu_count import ONE_GPU, Placement
from lowmem_ft.recipe.shipped.fine_tuning_methods import Method


@dataclass(frozen=True)
class Route:
    """A recipe and settings of it, for GPUs with or without bfloat16.

    Args:
        settings: the recipe and its settings.
        rows: rows of a micro-batch to choose from for each GPU, the fewest first; empty: the recipe's own.
        kept: quarters of the layers to choose from that keep their activations, the most first; likewise.
        float32: where its weights in float32 are.
    """

    settings: tuple[str, ...]
    rows: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    float32: Literal["", "on the device", "on the host"] = ""


def routes_of(method: Method, placement: Placement, *, has_bfloat16: bool) -> list[tuple[Route, ...]]:
    """Return groups of routes in the order of preference; within a group the fastest that fits is chosen.

    Several processes have the routes of one that neither stream weights nor keep them on the host: they have each
    other. What an engine does not do, such as an update in backward under ddp, the recipe's rules refuse.

    Args:
        method: the method.
        placement: the GPUs of a run.
        has_bfloat16: whether they compute with it.
    """
    first, *others = ((f"recipe={rung}", *placement.settings) for rung in method.rungs)
    if has_bfloat16:
        roomy = Route((*first, *method.roomy), rows=method.rows, kept=method.kept)
        if not method.leaner:
            return [(roomy,)]
        as_shipped, leaner = Route(first), Route((*first, *method.leaner), rows=method.leaner_rows)
        if (
            placement.plan.copies_weights
        ):  # no update in backward, which the others have: the layers are checkpointed
            return [(Route((*first, *method.roomy), rows=method.leaner_rows, kept=(QUARTERS, 0)),)]
        last = others if placement == ONE_GPU else others[:1]
        return [(as_shipped, roomy), (leaner,), *((Route(other),) for other in last)]
    if method.resident_without_bfloat16 is None:
        return [(Route((*first, *method.without_bfloat16), rows=method.rows, kept=method.kept),)]
    resident = (f"recipe={method.resident_without_bfloat16}", *placement.settings)
    if placement != ONE_GPU:
        whole = (*first, *method.roomy, *method.without_bfloat16)
        return [(Route(resident),), (Route(whole, rows=method.leaner_rows, kept=(0,)),)]
    last = (*others[-1], *method.without_bfloat16)
    return [(Route(resident, float32="on the device"),), (Route(last, float32="on the host"),)]
