"""The gain of fused kernels on top of a plan.

A plan does not take them: they come from a package that the training machine may lack, and they round differently.
"""

from __future__ import annotations

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.planner.memory_plan import Choice, MemoryPlan
from lowmem_ft.planner.plan_target import Target
from lowmem_ft.recipe import check_recipe
from lowmem_ft.recipe.shipped.fine_tuning_methods import FUSED_KERNELS
from lowmem_ft.recipe.space.search_space import with_settings

LEAST_GAIN = 0.01
"""Share of a step's seconds: less is not worth a package."""


def with_fused_kernels(result: MemoryPlan, target: Target) -> Choice | None:
    """Return a plan's needs with Liger's kernels, by one estimate.

    Args:
        result: a plan that fits.
        target: the device it was made for.

    Returns:
        The needs, with the plan's own changes of the recipe and this one; None if the recipe has such kernels already
        or keeps its own, if the package is not installed or does not know the model or the device, or if a step would
        gain less than a hundredth of its seconds.
    """
    (key,) = FUSED_KERNELS
    seconds = None if result.estimate.step is None else result.estimate.step.seconds
    if target.gpu is None or seconds is None or result.recipe.model.kernels != "none":
        return None
    if {key, key.partition(".")[0]} & set(result.recipe.plan.keep):
        return None
    fused = with_settings(result.recipe, FUSED_KERNELS)
    try:
        check_recipe(fused)
        estimate, _ = target.estimate(fused)
    except UserError:  # no package, or kernels that do not suit the model, the device or the engine
        return None
    if not estimate.fits or estimate.step is None or estimate.step.seconds > (1 - LEAST_GAIN) * seconds:
        return None
    return Choice(
        overrides={**result.overrides, **FUSED_KERNELS},
        device_bytes=estimate.process_high_bytes,
        host_bytes=estimate.host_peak_bytes,
        step_seconds=estimate.step.seconds,
    )
