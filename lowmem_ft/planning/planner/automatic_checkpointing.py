"""Choice of the layers to checkpoint, with all other knobs as in the recipe: ``checkpointing.mode=auto``.

A search of the planner whose dimensions are the mode and the number of last layers that it skips, of which it takes as
many as fit (``planning/planner/search/most_layers.py``). The choice has been estimated in full.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.planning.estimator.device_target import choose_gpu
from lowmem_ft.planning.planner.explain import explained
from lowmem_ft.planning.planner.memory_plan import MemoryPlan
from lowmem_ft.planning.planner.plan_target import Target
from lowmem_ft.planning.planner.planning import quiet_logs
from lowmem_ft.planning.planner.search.candidates import candidates_of
from lowmem_ft.planning.planner.search.estimated_search import OnProgress, search_in
from lowmem_ft.planning.planner.search.neighbours import Neighbours
from lowmem_ft.planning.planner.search.search_findings import Findings
from lowmem_ft.planning.planner.smallest_gpu import smallest_fitting_gpu
from lowmem_ft.recipe import Recipe, check_recipe
from lowmem_ft.recipe.named_recipe import RecipeLike, as_budget, as_recipe
from lowmem_ft.recipe.space.search_space import Dimension, Settings, Space, space_over
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig

_MODE, _SKIPPED = "checkpointing.mode", "checkpointing.skip_last_layers"

_EVERY = (1, 1)
"""The combination of the space that checkpoints every layer in full."""

_IN_ORDER = [(0, 1), (1, 0), (2, 0), _EVERY, (2, 1)]
"""The combinations from the fewest recomputed layers to the most, of equally many with the least memory first."""

_LEAST_GAIN = 0.001
"""Smallest gain, as a share of the step's seconds, that is mentioned."""


@quiet_logs()
def plan_checkpointing(
    recipe: RecipeLike,
    budget: Budget | str | None = None,
    gpu: str | Gpu | None = None,
    *,
    on_progress: OnProgress = lambda progress: None,
) -> MemoryPlan:
    """Return the plan whose checkpointed layers make a step fastest inside a budget, with nothing else changed.

    Losses and gradients are the same bit for bit, whatever is chosen. On a processor, which has no timing model, the
    plan recomputes the fewest layers.

    Args:
        recipe: a recipe, or its name or path; its ``checkpointing`` is ignored; normally it is ``mode=auto``.
        budget: what may be used, or the device's part such as ``24GiB``; None: the recipe's own.
        gpu: the device, as for :func:`lowmem_ft.estimate_memory`.
        on_progress: called before each estimate.

    Returns:
        The plan, its recipe with a mode and a number of layers; if nothing fits, the nearest, with what is missing.

    Raises:
        RecipeError: if the recipe has conflicts.
        UserError: if there is neither a budget nor a GPU, a budget is not available, or no choice runs on the device.
        ModelError: if the model cannot be found or traced.
        KeyboardInterrupt: if the user ends it.
    """
    start = time.perf_counter()
    recipe = as_recipe(recipe)
    asked = dataclasses.replace(
        recipe,
        checkpointing=CheckpointingConfig(mode="auto"),
        budget=as_budget(budget) or recipe.budget,
    )
    check_recipe(asked)
    _refuse_without_limit(asked, gpu)
    target = Target.of(asked, gpu)
    space = _space(asked, target)
    candidates = candidates_of(space, target.shape, target.gpu)
    # None counts as simpler than another: the plan is the fastest, and of equally fast ones recomputes least.
    candidates = dataclasses.replace(
        candidates,
        changes_N=np.zeros_like(candidates.changes_N),
        after_N=np.array([_IN_ORDER.index(combination) for combination in space.combinations]),
    )
    with search_in(space, candidates, target, on_progress) as search:
        neighbours = Neighbours(space, search)
        search.run(neighbours.place_of(_EVERY))
        if not search.found.needs:
            raise UserError(next(reversed(search.found.refused.values())))
        findings = Findings.of(search, space, target.limits, asked)
        found = explained(findings, neighbours)
        smallest = None if found.fits else smallest_fitting_gpu(found, target)
    others = [place for place in findings.fitting() if place != findings.found.best]
    return dataclasses.replace(
        found,
        recipe=dataclasses.replace(found.recipe, budget=recipe.budget),
        alternatives=tuple(map(findings.choice, others)),
        counts=dataclasses.replace(found.counts, left=0),  # between two estimates, their order excludes them
        left_seconds=0.0,
        smallest_gpu=smallest,
        seconds=time.perf_counter() - start,
    )


def chosen_in_words(found: MemoryPlan) -> str:
    """Return the choice as a log line: ``checkpointing.mode=auto: full, skip_last_layers=12 (fits with 0.8 ...)``.

    Args:
        found: the plan returned by :func:`plan_checkpointing`.
    """
    config, estimate = found.recipe.checkpointing, found.estimate
    skipped = f", skip_last_layers={config.skip_last_layers}" if config.skip_last_layers else ""
    of_host = estimate.budget.host_bytes
    spare = [] if estimate.headroom_bytes is None else [estimate.headroom_bytes]
    spare += [] if of_host is None else [of_host - estimate.host_peak_bytes]
    words = [f"fits with {format_bytes(min(spare))} to spare" if spare else "fits"]
    if not found.fits:
        missing = found.missing_device_bytes + found.missing_host_bytes
        lacks = f"lacks {format_bytes(missing)} with 6% to spare" if missing else "does not fit"
        words = [f"the smallest that it can choose, which {lacks}"]
        words += [f"{found.smallest_gpu} would do"] if found.smallest_gpu is not None else []
    return f"checkpointing.mode=auto: {config.mode}{skipped} ({', '.join([*words, *_gain(found)])})"


def _gain(found: MemoryPlan) -> list[str]:
    """Return how much faster the choice is than checkpointing every layer; empty if not estimated or about equal."""
    every = {_MODE: "full"}
    seconds = [choice.step_seconds for choice in found.alternatives if dict(choice.overrides) == every]
    if found.estimate.step is None or not seconds or not seconds[0]:
        return []
    gain = 1 - found.estimate.step.seconds / seconds[0]
    return [f"{100 * gain:.1f}% faster than every layer checkpointed"] if gain >= _LEAST_GAIN else []


def _refuse_without_limit(recipe: Recipe, gpu: str | Gpu | None) -> None:
    """Raise an error, rather than choose for this machine's free memory, if the user named no device and no budget."""
    budget, use_cpu = recipe.budget, recipe.training.use_cpu
    is_limited = use_cpu or gpu is not None or budget.device is not None or budget.host is not None
    if is_limited or choose_gpu(None, budget, use_cpu=False)[0] is not None:
        return
    raise UserError(
        "checkpointing.mode=auto needs a budget or a GPU, got neither, and this machine has no GPU. Set budget=24GiB, "
        "name a GPU with --gpu NAME, or set checkpointing.mode=full."
    )


def _space(recipe: Recipe, target: Target) -> Space:
    """Return the modes, those that recompute layers with as many last layers left out as fit, or none.

    Raises:
        UserError: if the device refuses all of them.
    """
    modes: tuple[Settings, ...] = ({_MODE: "none"}, {_MODE: "full"}, {_MODE: "selective"})
    skips: tuple[Settings, ...] = ({_SKIPPED: max(0, target.shape.num_layers - 1)}, {_SKIPPED: 0})
    dimensions = Dimension(choices=modes), Dimension(choices=skips, is_counted=True)
    space = space_over(recipe, dimensions, then=target.rules)
    if not space.combinations:
        raise UserError(*(problem for rule in target.rules for problem in rule.problems(recipe)))
    return space
