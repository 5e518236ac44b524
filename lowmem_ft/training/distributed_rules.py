"""What a recipe asks for that works in one process only."""

from __future__ import annotations

import os

from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.keys import memory_knobs


def launched_processes(recipe: Recipe) -> int:
    """How many processes the launcher started, as it tells each of them; 1 without one.

    As accelerate counts: on a GPU a process without ``LOCAL_RANK`` trains by itself, whatever ``WORLD_SIZE`` a cluster
    has set.
    """
    if not recipe.training.use_cpu and int(os.environ.get("LOCAL_RANK") or -1) == -1:
        return 1
    return int(os.environ.get("WORLD_SIZE") or 1)


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
