"""Several GPUs where one is not enough: the smallest number of each type that trains a recipe with FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.catalog.context_overhead import process_overhead_bytes
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.planning.estimator.device_target import limits
from lowmem_ft.planning.estimator.estimate import CannotRun, SharedTraces
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.rules.engine_rules import problems_with_engine, problems_with_processes
from lowmem_ft.recipe.space.search_space import with_settings

NUMBERS = (2, 4, 8)
"""Numbers of GPUs that one machine has, and is rented with."""


@dataclass(frozen=True, kw_only=True)
class SeveralGpus:
    """Numbers of GPUs that together hold a recipe, where one GPU does not.

    Args:
        tried: numbers of GPUs that were tried, smallest first; may be empty.
        estimates: for each type of GPU that fits, the estimate with the smallest number of it, in the order of the
            GPUs.
        problems: why the recipe cannot be sharded; empty if it can.
    """

    tried: tuple[int, ...] = ()
    estimates: tuple[MemoryEstimate, ...] = ()
    problems: tuple[str, ...] = ()


def estimate_on_several(
    recipe: Recipe,
    gpus: Sequence[Gpu],
    *,
    numbers: Sequence[int] = NUMBERS,
    budget: Budget | None = None,
    kept: KeptTraces | None = None,
    on_number: Callable[[int], object] = lambda number: None,
) -> SeveralGpus:
    """Find the smallest number of each GPU with which a recipe fits, sharded by ``distributed.strategy=fsdp2``.

    The GPU with the most room is tried first: where it does not hold its part, those with less are not tried with that
    number. All GPUs with bfloat16 share one trace, and so do those without: the kernels of all took the same memory and
    did the same work when compared (``tests/planning/estimator/test_gpu_counts.py``). Each process takes the recipe's
    batch, so that a step of N processes has N times its tokens.

    Args:
        recipe: the recipe to train; one that sets its own number of processes is not tried.
        gpus: GPUs of which one is not enough.
        numbers: numbers of GPUs, smallest first.
        budget: the budget of each process; None: the recipe's own.
        kept: as for :func:`lowmem_ft.planning.estimator.estimate_memory`; None: the numbers share what they can.
        on_number: called with each number before it is tried.

    Returns:
        The numbers tried, and the estimates that fit.
    """
    config = recipe.distributed
    if not gpus or config.num_machines > 1 or (config.strategy, config.num_processes) != (None, None):
        return SeveralGpus()
    if problems := tuple(problems_with_engine(recipe, "fsdp2")):
        return SeveralGpus(problems=problems)
    budget, kept = budget or recipe.budget, kept or KeptTraces()
    found: dict[str, MemoryEstimate] = {}
    tried: list[int] = []
    for number in (number for number in numbers if number % config.context == 0):
        waiting = [gpu for gpu in gpus if gpu.name not in found]
        cut = with_settings(recipe, {"distributed.strategy": "fsdp2", "distributed.num_processes": number})
        if problems := tuple(problems_with_processes(cut, number)):
            return SeveralGpus(tried=tuple(tried), estimates=_in_order(found, gpus), problems=problems)
        if not waiting:
            break
        on_number(number)
        tried.append(number)
        found |= {estimate.gpu.name: estimate for estimate in _that_fit(waiting, cut, budget, kept)}
    return SeveralGpus(tried=tuple(tried), estimates=_in_order(found, gpus))


def _in_order(found: dict[str, MemoryEstimate], gpus: Sequence[Gpu]) -> tuple[MemoryEstimate, ...]:
    return tuple(found[gpu.name] for gpu in gpus if gpu.name in found)


def _that_fit(gpus: Sequence[Gpu], recipe: Recipe, budget: Budget, kept: KeptTraces) -> list[MemoryEstimate]:
    """Return estimates from the GPU with the most room down to the last that fits, by whether it has bfloat16."""
    fitting: list[MemoryEstimate] = []
    shared = SharedTraces(recipe, budget=budget, kept=kept, kind=_alike(recipe))
    over: set[bool] = set()
    for gpu in sorted(gpus, key=lambda gpu: room_bytes(gpu, recipe, budget), reverse=True):
        if gpu.has_bfloat16 in over:
            continue
        result = shared.estimate(gpu)
        if isinstance(result, CannotRun) or not result.fits:
            over.add(gpu.has_bfloat16)
        else:
            fitting.append(result)
    return fitting


def _alike(recipe: Recipe) -> Callable[[Gpu], object]:
    """Return a key for GPUs that share a trace; deterministic kernels split their sums by multiprocessors."""
    if recipe.training.full_determinism:
        return lambda gpu: (gpu.has_bfloat16, gpu.num_multiprocessors)
    return lambda gpu: gpu.has_bfloat16


def room_bytes(gpu: Gpu, recipe: Recipe, budget: Budget) -> int:
    """Return the bytes that a process may hold in tensors.

    Args:
        gpu: the GPU.
        recipe: the recipe that the process trains.
        budget: its budget.
    """
    outside = process_overhead_bytes(
        gpu, uses_bitsandbytes=recipe.uses_bitsandbytes, num_processes=recipe.distributed.num_processes or 1
    )
    limit = limits(gpu, budget).device_bytes
    return (gpu.memory_bytes if limit is None else limit) - sum(outside.values())
