"""Several cards where one is not enough: the smallest number of each that trains a recipe by fsdp2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowmem_ft.budget import Budget
from lowmem_ft.catalog.gpu_spec import Gpu
from lowmem_ft.estimator.device_target import limits
from lowmem_ft.estimator.estimate import CannotRun, SharedTraces
from lowmem_ft.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.memory.memory_estimate import MemoryEstimate
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.rules.engine_rules import problems_with_engine
from lowmem_ft.training.distributed.distributed_rules import problems_with_processes
from lowmem_ft.virtual_gpu.replay.context_overhead import process_overhead_bytes

NUMBERS = (2, 4, 8)
"""Of cards: what one machine has, and is rented with."""


@dataclass(frozen=True, kw_only=True)
class SeveralCards:
    """What several cards of a kind are good for, where one does not hold a recipe.

    Args:
        tried: numbers of cards that were tried, smallest first; empty if none were.
        estimates: with the smallest number of each card that fits, in the order of the cards; none of a card that does
            not fit with any.
        problems: why the recipe cannot be cut; empty if it can.
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
) -> SeveralCards:
    """The smallest number of each card with which a recipe fits, cut by ``distributed.strategy=fsdp2``.

    The card with the most room is tried first: where it does not hold its part, those with less are not tried with that
    number. All cards with bfloat16 share one trace, and so do those without: the kernels of all were seen to take the
    same memory and the same work (``tests/estimator/test_gpu_counts.py``). Each process takes the recipe's batch, so
    that a step of N processes has N times its tokens.

    Args:
        recipe: what would be trained; one that says itself how many processes train it is not tried.
        gpus: cards of which one is not enough.
        numbers: of cards, smallest first.
        budget: of each process; None: the recipe's own.
        kept: as for :func:`lowmem_ft.estimator.estimate_memory`; None: the numbers share what they can.
        on_number: is told of each number before it is tried.

    Returns:
        What was tried, and what fits.
    """
    config = recipe.distributed
    if not gpus or config.num_machines > 1 or (config.strategy, config.num_processes) != (None, None):
        return SeveralCards()
    if problems := tuple(problems_with_engine(recipe, "fsdp2")):
        return SeveralCards(problems=problems)
    budget, kept = budget or recipe.budget, kept or KeptTraces()
    found: dict[str, MemoryEstimate] = {}
    tried: list[int] = []
    for number in numbers:
        waiting = [gpu for gpu in gpus if gpu.name not in found]
        cut = _cut(recipe, number)
        if problems := tuple(problems_with_processes(cut, number)):
            return SeveralCards(tried=tuple(tried), estimates=_in_order(found, gpus), problems=problems)
        if not waiting:
            break
        on_number(number)
        tried.append(number)
        found |= {estimate.gpu.name: estimate for estimate in _that_fit(waiting, cut, budget, kept)}
    return SeveralCards(tried=tuple(tried), estimates=_in_order(found, gpus))


def _cut(recipe: Recipe, number: int) -> Recipe:
    distributed = dataclasses.replace(recipe.distributed, strategy="fsdp2", num_processes=number)
    return dataclasses.replace(recipe, distributed=distributed)


def _in_order(found: dict[str, MemoryEstimate], gpus: Sequence[Gpu]) -> tuple[MemoryEstimate, ...]:
    return tuple(found[gpu.name] for gpu in gpus if gpu.name in found)


def _that_fit(gpus: Sequence[Gpu], recipe: Recipe, budget: Budget, kept: KeptTraces) -> list[MemoryEstimate]:
    """Estimates from the card with the most room down to the last that fits, by whether it has bfloat16."""
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
    """Cards whose traces are one; deterministic kernels split their sums by multiprocessors."""
    if recipe.training.full_determinism:
        return lambda gpu: (gpu.has_bfloat16, gpu.num_multiprocessors)
    return lambda gpu: gpu.has_bfloat16


def room_bytes(gpu: Gpu, recipe: Recipe, budget: Budget) -> int:
    """What a process may hold in tensors.

    Args:
        gpu: the card.
        recipe: what the process trains.
        budget: of it.
    """
    outside = process_overhead_bytes(
        gpu, uses_bitsandbytes=recipe.uses_bitsandbytes, num_processes=recipe.distributed.num_processes or 1
    )
    limit = limits(gpu, budget).device_bytes
    return (gpu.memory_bytes if limit is None else limit) - sum(outside.values())
