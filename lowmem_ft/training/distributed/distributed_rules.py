"""Rules for recipes in several processes: which settings do not work with their engine."""

from __future__ import annotations

from collections.abc import Iterator

from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.rules.engine_rules import engine_of, problems_with_engine


def problems_with_processes(recipe: Recipe, num_processes: int) -> Iterator[str]:
    """Yield the problems of a recipe with the engine of several processes, and with a plan that is still to be made.

    Args:
        recipe: the recipe to train; without ``distributed.strategy`` each process has a whole model (ddp).
        num_processes: processes of the run.

    Yields:
        For each such setting the rule, the values seen and the way out; nothing for one process whose recipe names no
        strategy.
    """
    if num_processes > 1:
        ways_out = {
            "plan.mode=auto": "Plan first, with `lowmem-ft plan ... --write my.yaml`, and train recipe=my.yaml.",
            "checkpointing.mode=auto": "`lowmem-ft estimate` with the same settings shows its choice: set that.",
        }
        for setting in recipe.left_to_choose:
            yield f"{setting} makes a plan for one process, got {num_processes}. {ways_out[setting]}"
    if (engine := engine_of(recipe, num_processes)) is not None:
        yield from problems_with_engine(recipe, engine)
