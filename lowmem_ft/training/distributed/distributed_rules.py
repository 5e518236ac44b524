"""Rules for recipes in several processes: which settings do not work with their engine."""

from __future__ import annotations

from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.rules.engine_rules import engine_of, problems_with_engine


def problems_with_processes(recipe: Recipe, num_processes: int) -> list[str]:
    """Return the problems of a recipe with the engine of several processes, and with a plan that is still to be made.

    Args:
        recipe: the recipe to train; without ``distributed.strategy`` each process has a whole model (ddp).
        num_processes: processes of the run.

    Returns:
        For each such setting the rule, the values seen and the way out; empty for one process whose recipe names no
        strategy.
    """
    engine = engine_of(recipe, num_processes)
    problems = [] if engine is None else list(problems_with_engine(recipe, engine))
    if num_processes == 1:
        return problems
    ways_out = {
        "plan.mode=auto": "Plan first, with `lowmem-ft plan ... --write my.yaml`, and train recipe=my.yaml.",
        "checkpointing.mode=auto": "`lowmem-ft estimate` with the same settings shows its choice: set that.",
    }
    return [
        f"{setting} makes a plan for one process, got {num_processes}. {ways_out[setting]}"
        for setting in recipe.left_to_choose
    ] + problems
