"""What a recipe asks for that works in one process only."""

from __future__ import annotations

from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.keys import memory_knobs


def problems_with_processes(recipe: Recipe, num_processes: int) -> list[str]:
    """What reads a gradient before it has been summed over all processes, and a plan that is still to be made.

    Args:
        recipe: what is to be trained.
        num_processes: in how many.

    Returns:
        For each such setting the rule, the values seen and the way out; nothing for one process.
    """
    if num_processes == 1:
        return []
    ways_out = {
        "plan.mode=auto": "Plan first, with `lowmem-ft plan ... --write my.yaml`, and train recipe=my.yaml.",
        "checkpointing.mode=auto": "`lowmem-ft estimate` with the same settings says what it chooses: set that.",
    }
    return [
        f"{setting} plans for one process, got {num_processes}. {ways_out[setting]}"
        for setting in recipe.left_to_choose
    ] + [
        f"{key.setting(value)} works in one process, got {num_processes}. Set {key.setting(key.default)}, or start one "
        "process."
        for key, value, effect in memory_knobs(recipe)
        if effect.one_process_only
    ]
