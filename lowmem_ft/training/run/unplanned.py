"""Refusal of recipes whose memory knobs are still to be chosen."""

from __future__ import annotations

from lowmem_ft.foundation.errors import RecipeError
from lowmem_ft.recipe import Recipe


def refuse_unplanned(recipe: Recipe) -> None:
    """Refuse a recipe that still has to be planned, which happens in the layers above training.

    Raises:
        UserError: if ``plan.mode`` or ``checkpointing.mode`` is auto.
    """
    if recipe.plan.mode == "auto":
        raise RecipeError(
            "plan.mode=auto must be resolved before training, got a recipe that still has it. Train "
            "lowmem_ft.plan(recipe).recipe, which `lowmem-ft plan ... --write FILE.yaml` writes, or set "
            "plan.mode=none."
        )
    recipe.checkpointing.refuse_unchosen()
