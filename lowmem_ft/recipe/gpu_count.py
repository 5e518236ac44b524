"""The number of GPUs that a recipe is estimated or planned for, by ``--gpu 8xrtx-4090`` and ``distributed``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from lowmem_ft.foundation.catalog.gpu_catalog import split_count
from lowmem_ft.foundation.errors import RecipeError, raise_problems
from lowmem_ft.recipe.tree import Recipe
from lowmem_ft.techniques.distributed.config import DistributedConfig, Strategy


def on_gpus(recipe: Recipe, gpu: str | None, *, is_planned: bool = False) -> tuple[Recipe, str | None]:
    """Return the recipe with ``distributed`` as at launch, one process per GPU, and the GPU's own name.

    GPUs given with a count share the model by FSDP2 where the recipe leaves the strategy open. A number of processes
    without a strategy means DDP, as at launch.

    Args:
        recipe: the recipe to estimate.
        gpu: such as ``8xrtx-4090`` or ``rtx-4090``, or None.
        is_planned: whether an open strategy stays open, for a plan to choose, unless ``plan.keep`` holds it.

    Returns:
        The recipe and the name; a recipe for one process is returned unchanged.

    Raises:
        RecipeError: if the two disagree, or the strategy cannot be traced; lists all problems.
        UserError: if the count is invalid.
    """
    count, name = (None, gpu) if gpu is None else split_count(gpu)
    config = recipe.distributed
    raise_problems([*_problems(config, count, gpu)], RecipeError)
    num_processes = count or config.num_processes or 1
    if num_processes == 1:
        return recipe, name
    left_open: Strategy | None = "ddp" if count is None else "fsdp2"
    if is_planned and not {"distributed", "distributed.strategy"} & {*recipe.plan.keep}:
        left_open = None
    strategy = left_open if config.named_engine is None else config.strategy
    filled = dataclasses.replace(config, strategy=strategy, num_processes=num_processes)
    return dataclasses.replace(recipe, distributed=filled), name


def _problems(config: DistributedConfig, count: int | None, gpu: str | None) -> Iterator[str]:
    strategy, processes, machines = config.strategy, config.num_processes, config.num_machines
    if config.plan().has_engine:
        yield (
            f"distributed.strategy={strategy} uses DeepSpeed's engine, which cannot be traced. Estimate "
            "distributed.strategy=fsdp2, which shards the same things as zero3, or ddp, which shards nothing."
        )
    if count is None:
        if config.named_engine is not None and not config.plan().several:
            yield (
                f"distributed.strategy={strategy} is for several processes, and their number is not set. Name the "
                "GPUs, such as --gpu 8xrtx-4090, or set distributed.num_processes."
            )
        return
    if processes not in (None, count):
        yield (
            f"distributed.num_processes={processes}, but {gpu} is {count} {'GPU' if count == 1 else 'GPUs'} with one "
            "process each. Correct one of the two, or leave distributed.num_processes out."
        )
    elif count == 1 and config.named_engine is not None:
        yield (
            f"distributed.strategy={strategy} is for several processes, got {gpu}. Name more GPUs, or set "
            "distributed.strategy=none."
        )
    if count % machines:
        yield (
            f"distributed.num_machines={machines} must have the same number of GPUs each, got {gpu}. Correct one of "
            "the two."
        )
