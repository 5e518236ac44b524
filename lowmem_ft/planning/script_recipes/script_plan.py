"""The memory knobs of a user's script, chosen for a budget."""

from __future__ import annotations

import dataclasses
from typing import Any

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.planning.planner import MemoryPlan
from lowmem_ft.planning.preflight.plan_first import planned_for_this_machine
from lowmem_ft.planning.script_recipes.script_recipe import recipe_from
from lowmem_ft.recipe.plan_config import PlanConfig
from lowmem_ft.recipe.trainers.trainer_kinds import DECIDED_BY_A_TRAINER


def plan_for(trainer: Any, budget: Budget | str) -> MemoryPlan:
    """Choose the memory knobs with which a step of a trainer is fastest inside a budget on this machine.

    The script's model, rows, learning rate and precision stay. The plan is made in a separate process, as a virtual GPU
    would change torch for the trainer.

    Args:
        trainer: ``transformers.Trainer`` or ``trl.SFTTrainer``, before ``hf.attach`` and ``train()``.
        budget: the memory that may be used: a budget, or the device's part such as ``24GiB``.

    Returns:
        The plan; attach its recipe.

    Raises:
        UserError: if a recipe cannot describe the trainer's script, or it cannot be planned.
        DoesNotFitError: if nothing fits; it says what the nearest lacks.
    """
    limit = Budget(device=budget) if isinstance(budget, str) else budget
    recipe = recipe_from(trainer)
    recipe = dataclasses.replace(
        recipe, budget=limit, plan=PlanConfig(mode="auto", keep=DECIDED_BY_A_TRAINER)
    )
    found = planned_for_this_machine(recipe)
    return dataclasses.replace(found, recipe=dataclasses.replace(found.recipe, budget=limit))
