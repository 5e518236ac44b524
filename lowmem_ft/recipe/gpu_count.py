"""The number of GPUs that a recipe is estimated or planned for, by ``--gpu 8xrtx-4090`` and ``distributed``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowmem_ft.foundation.catalog.gpu_catalog import split_count
from lowmem_ft.foundation.errors import RecipeError, raise_problems
from lowmem_ft.foundation.parallel_plan import ParallelPlan, plan_of
from lowmem_ft.recipe.tree import Recipe
from lowmem_ft.techniques.distributed.config import DistributedConfig, Strategy

TRACED_ENGINES = ("ddp", "fsdp2")
"""Engines of several processes that an estimate can follow."""


@dataclass(frozen=True)
class Placement:
    """The GPUs of one type that train a model together, and what their processes share.

    Args:
        plan: the processes, one on each GPU.
    """

    plan: ParallelPlan

    @property
    def count(self) -> int:
        """The number of GPUs."""
        return self.plan.num_processes

    @property
    def engine(self) -> str | None:
        """The engine by which several processes share the model; None for one GPU."""
        return self.plan.engine

    @property
    def settings(self) -> tuple[str, ...]:
        """The setting that names the engine; the launcher, or ``--gpu``, names the number."""
        return () if self.engine is None else (f"distributed.strategy={self.engine}",)

    @property
    def in_words(self) -> str:
        """Say how the GPUs train together, as the end of a clause; empty for one."""
        return "" if self.engine is None else f", {self.engine} of {self.count} GPUs"

    def of(self, recipe: Recipe, gpu: str) -> Recipe:
        """Return the recipe with ``distributed`` as at launch on these GPUs; see :func:`on_gpus`."""
        return on_gpus(recipe, None if self.engine is None else self.word(gpu))[0]

    def word(self, gpu: str) -> str:
        """Return the GPUs as ``--gpu`` takes them."""
        return gpu if self.engine is None else f"{self.count}x{gpu}"


ONE_GPU = Placement(ParallelPlan())


def placements(count: int, strategy: str | None = None) -> Sequence[Placement]:
    """Return the ways to place a model on this many GPUs: with every engine, unless the strategy names one."""
    if count == 1:
        return (ONE_GPU,)
    named = [engine for engine in TRACED_ENGINES if engine == strategy]
    return tuple(Placement(plan_of(engine, count)) for engine in named or TRACED_ENGINES)


def dealt_rows(rows: int, micro_batches: int, count: int) -> tuple[int, int]:
    """Deal the rows of a step out among processes.

    Args:
        rows: rows of a micro-batch, of one process.
        micro_batches: micro-batches of a step, of one process.
        count: number of processes.

    Returns:
        Rows of a micro-batch, and micro-batches, of each process: fewer micro-batches, and if these are too few,
        smaller ones. If the rows cannot be divided, each process takes the next larger number.
    """
    fewer = math.gcd(micro_batches, count)
    if rows % (count // fewer) == 0:
        return rows // (count // fewer), micro_batches // fewer
    each = math.ceil(rows * micro_batches / count)
    of_micro_batch = max(number for number in range(1, min(rows, each) + 1) if each % number == 0)
    return of_micro_batch, each // of_micro_batch


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
