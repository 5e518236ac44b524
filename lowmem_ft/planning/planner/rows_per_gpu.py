"""A single-process recipe on several GPUs, with the rows of its step divided among them."""

from __future__ import annotations

import dataclasses
import math

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.planning.estimator.gpu_counts import NUMBERS
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.space.search_space import ROWS, Settings, with_settings

COUNT = "distributed.num_processes"

DEALT = (*ROWS, COUNT, "distributed.strategy")
"""All keys that :func:`on_number` sets."""


def numbers_up_to(max_gpus: int, recipe: Recipe) -> tuple[int, ...]:
    """Return the numbers of GPUs that a plan is tried on, the fewest first.

    Args:
        max_gpus: the most GPUs.
        recipe: the recipe that the plan is for.

    Returns:
        1, and the numbers that a machine may have, as long as they divide the rows of a step.

    Raises:
        UserError: if it is not such a number, the recipe sets its own number of processes, or its rows must not change.
    """
    if max_gpus not in (1, *NUMBERS):
        several = ", ".join(map(str, NUMBERS[:-1]))
        raise UserError(
            f"max_gpus (--max-gpus) is 1, {several} or {NUMBERS[-1]}, got {max_gpus}. Set it to {NUMBERS[-1]}, which "
            "tries the smaller numbers first, or leave it out."
        )
    if max_gpus == 1:
        return (1,)
    config = recipe.distributed
    if (config.strategy, config.num_processes) != (None, None):
        raise UserError(
            f"The number of GPUs is either searched for, up to {max_gpus}, or set: the recipe is for "
            f"distributed.strategy={config.strategy} with distributed.num_processes={config.num_processes}. Leave "
            "these out, or do not set max_gpus."
        )
    if kept := {"training", *ROWS} & {*recipe.plan.keep}:
        raise UserError(
            f"Several GPUs share the rows of a step, and plan.keep holds {', '.join(sorted(kept))}. Leave it out, or "
            "do not set max_gpus."
        )
    micro_batch, micro_batches = _rows(recipe)
    rows, plan = micro_batch * micro_batches, recipe.distributed.plan
    divide = (number for number in NUMBERS if number <= max_gpus and rows % plan(number).data_width == 0)
    return (1, *divide)


def _dealt_out(recipe: Recipe, number: int) -> Settings:
    """Return the settings that make a recipe one process of several, with the same steps.

    Args:
        recipe: for one process.
        number: number of GPUs, which divides the rows of a step.

    Returns:
        Settings by dotted key; empty for one GPU. Each process takes fewer micro-batches, and if these are too few,
        smaller ones.
    """
    if number == 1:
        return {}
    micro_batch, micro_batches = _rows(recipe)
    width = recipe.distributed.plan(number).data_width
    fewer = math.gcd(micro_batches, width)
    rows = (micro_batch // (width // fewer), micro_batches // fewer)
    return {**dict(zip(ROWS, rows, strict=True)), COUNT: number}


def on_number(recipe: Recipe, number: int) -> Recipe:
    """Return the recipe with :func:`_dealt_out`; fsdp2 where ``plan.keep`` holds the strategy that it leaves open."""
    dealt = with_settings(recipe, _dealt_out(recipe, number))
    if number == 1 or not {"distributed", "distributed.strategy"} & {*recipe.plan.keep}:
        return dealt
    return dataclasses.replace(dealt, distributed=dataclasses.replace(dealt.distributed, strategy="fsdp2"))


def _rows(recipe: Recipe) -> tuple[int, int]:
    training = recipe.training
    return training.per_device_train_batch_size, training.gradient_accumulation_steps
