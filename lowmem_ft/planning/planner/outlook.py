"""Bounds and expectations of recipes on one device, for searches that estimate little."""

from __future__ import annotations

from dataclasses import dataclass

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.planning.estimator.device_target import choose_gpu
from lowmem_ft.planning.planner import bounds
from lowmem_ft.planning.planner.plan_target import Target
from lowmem_ft.planning.planner.search.candidates import expected_bytes
from lowmem_ft.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class PlannersOutlook:
    """The planner's bounds and expectations of a recipe's variants.

    Args:
        target: the model, its GPU and the limits.
        gpu: the GPU.
    """

    target: Target
    gpu: Gpu

    def cannot_fit(self, recipe: Recipe) -> bool:
        """Return whether a lower bound exceeds the memory that there is."""
        parts = bounds.parts_of(recipe, self.target.shape)
        needed = bounds.device_bytes(parts, self.gpu), bounds.host_bytes(parts)
        return any(self.target.limits.missing(*map(float, needed)))

    def should_fit(self, recipe: Recipe) -> bool:
        """Return whether the expected bytes, with headroom, are there."""
        return not any(self.target.limits.missing(*expected_bytes(recipe, self.target.shape, self.gpu)))


def outlook_for(recipe: Recipe, gpu: str | Gpu | None) -> PlannersOutlook | None:
    """Return the outlook of a recipe's variants on a device, or None: then estimates alone decide.

    A processor has no known bounds, and a budget that a plan refuses is left to an estimate, which shows how much it
    lacks.

    Args:
        recipe: a recipe of the model, with the budget.
        gpu: the device, as for :func:`lowmem_ft.estimate_memory`.
    """
    chosen, _ = choose_gpu(gpu, recipe.budget, use_cpu=recipe.training.use_cpu)
    if chosen is None:
        return None
    try:
        return PlannersOutlook(target=Target.of(recipe, gpu), gpu=chosen)
    except UserError:
        return None
