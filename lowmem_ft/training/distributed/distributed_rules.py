"""Rules for recipes in several processes: which settings do not work with their engine."""

from __future__ import annotations

from lowmem_ft.foundation.knob import Engine
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.rules.engine_rules import problems_with_engine


def problems_with_processes(recipe: Recipe, num_processes: int) -> list[str]:
    """Return the problems of a recipe with the engine of several processes, and with a plan that is still to be made.

    Args:
        recipe: the recipe to train; without ``distributed.strategy`` each process has a whole model (ddp).
        num_processes: processes of the run.

    Returns:
        For each such setting the rule, the values seen and the way out; empty for one process whose recipe names no
        strategy.
    """
    strategy = recipe.distributed.strategy
    if num_processes == 1:
        return [] if strategy in (None, "none") else list(problems_with_engine(recipe, strategy))
    engine: Engine = "ddp" if strategy in (None, "none") else strategy
    ways_out = {
        "plan.mode=auto": "Plan first, with `lowmem-ft plan ... --write my.yaml`, and train recipe=my.yaml.",
        "checkpointing.mode=auto": "`lowmem-ft estimate` with the same settings says what it chooses: set that.",
    }
    return [
        f"{setting} plans for one process, got {num_processes}. {ways_out[setting]}"
        for setting in recipe.left_to_choose
    ] + list(problems_with_engine(recipe, engine))
