"""The gains on top of a plan that it does not take by itself.

Fused kernels come from a package that the training machine may lack, and round differently. Packing fills rows with
several documents: which documents an optimizer step sees changes.
"""

from __future__ import annotations

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.planning.planner.memory_plan import Choice, MemoryPlan
from lowmem_ft.planning.planner.plan_target import Target
from lowmem_ft.recipe import check_recipe
from lowmem_ft.recipe.shipped.fine_tuning_methods import FUSED_KERNELS
from lowmem_ft.recipe.space.search_space import Settings, with_settings

LEAST_GAIN = 0.01
"""Share of a step's seconds: less is not worth a package, or a change of what a step trains on."""


_PACKING = {"data.packing": True}


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
    return None if result.recipe.model.kernels != "none" else _with(FUSED_KERNELS, result, target)


def with_packing(result: MemoryPlan, target: Target) -> Choice | None:
    """Return a plan's needs with packed rows, by one estimate, for as many tokens.

    Returns:
        Like :func:`with_fused_kernels`; None, too, where the recipe or the model refuses packed rows.
    """
    return None if result.recipe.data.packing else _with(_PACKING, result, target)


def _with(settings: Settings, result: MemoryPlan, target: Target) -> Choice | None:
    (key,) = settings
    seconds = None if result.estimate.step is None else result.estimate.step.seconds
    if target.gpu is None or seconds is None or {key, key.partition(".")[0]} & set(result.recipe.plan.keep):
        return None
    changed = with_settings(result.recipe, settings)
    try:
        check_recipe(changed)
        estimate, _ = target.estimate(changed)
    except UserError:  # no package, or something that does not suit the model, the device or the engine
        return None
    if not estimate.fits or estimate.step is None or estimate.step.seconds > (1 - LEAST_GAIN) * seconds:
        return None
    return Choice(
        overrides={**result.overrides, **settings},
        device_bytes=estimate.process_high_bytes,
        host_bytes=estimate.host_peak_bytes,
        step_seconds=estimate.step.seconds,
    )
