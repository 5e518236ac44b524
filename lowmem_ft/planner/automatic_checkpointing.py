"""Choice of the layers to checkpoint, with all other knobs as in the recipe: ``checkpointing.mode=auto``.

A question to the planner's search whose only dimension is the config of checkpointing: a mode and the number of last
layers that it skips. Rules, bounds and estimates are the planner's; what to estimate next is decided here, since each
layer that is not checkpointed costs the bytes of its activations and saves the seconds of its second forward pass:
skipping more layers never takes less memory or more time, which ``tests/planner/test_automatic_checkpointing.py``
checks against estimates. So for each mode the largest number of layers that fits is narrowed down, and the step time
decides between the two. The choice has been estimated in full.

The skipped layers are the last ones, also in models whose layers differ (alternating local and global attention, dense
layers before experts). Backward reaches them first, so their activations are freed before any other layer is
recomputed: no other choice of the same number of identical layers takes less. Where layers alternate, the last n are a
mixture of all kinds; picking one kind would only pay if it saved far more seconds per byte, as with very long rows of
global attention, and every kind of stack would need a knob of its own. Experts after dense layers are the last layers
anyway.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Literal

import numpy as np

from lowmem_ft.budget import Budget
from lowmem_ft.catalog.gpu_spec import Gpu
from lowmem_ft.estimator.device_target import choose_gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.planner.explain import explained
from lowmem_ft.planner.memory_plan import MemoryPlan
from lowmem_ft.planner.plan_target import Target
from lowmem_ft.planner.planning import only_looking
from lowmem_ft.planner.search.candidates import candidates_of
from lowmem_ft.planner.search.estimated_needs import Need
from lowmem_ft.planner.search.estimated_search import OnProgress, search_in
from lowmem_ft.planner.search.neighbours import Neighbours
from lowmem_ft.planner.search.search import Search
from lowmem_ft.planner.search.search_findings import Findings
from lowmem_ft.planner.smallest_gpu import smallest_fitting_gpu
from lowmem_ft.recipe import Recipe, check_recipe
from lowmem_ft.recipe.named_recipe import RecipeLike, as_budget, as_recipe
from lowmem_ft.recipe.space.search_space import Dimension, Settings, Space, space_over
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig

Mode = Literal["none", "full", "selective"]

_MODE, _SKIPPED = "checkpointing.mode", "checkpointing.skip_last_layers"

_NONE: Settings = {_MODE: "none", _SKIPPED: 0}

_LEAST_GAIN = 0.001
"""Smallest gain, as a share of the step's seconds, that is mentioned."""


@only_looking()
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
    # None counts as simpler than another: the plan is the fastest.
    candidates = dataclasses.replace(candidates, changes_N=np.zeros_like(candidates.changes_N))
    with search_in(space, candidates, target, on_progress) as search:
        neighbours = Neighbours(space, search)
        _Question(space, neighbours, search, target).ask()
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
    """Return all choices as one dimension, from the fewest recomputed layers to the most.

    Raises:
        UserError: if the device refuses all of them.
    """
    skips = range(max(0, target.shape.num_layers - 1), -1, -1)
    choices: list[Settings] = [
        {_MODE: mode, _SKIPPED: skip} for skip in skips for mode in ("selective", "full")
    ]
    space = space_over(recipe, (Dimension(choices=(_NONE, *choices)),), then=target.rules)
    if not space.combinations:
        raise UserError(*(problem for rule in target.rules for problem in rule.problems(recipe)))
    return space


class _Question:
    """The estimates that the choice depends on.

    Args:
        space: the choices that no rule refuses.
        neighbours: their indices.
        search: makes each estimate once.
        target: the limits, and the model's number of layers.
    """

    def __init__(self, space: Space, neighbours: Neighbours, search: Search, target: Target) -> None:
        self._choices = space.dimensions[0].choices
        self._place_of = neighbours.place_of
        self._search = search
        self._limits = target.limits
        self._num_layers = target.shape.num_layers

    def ask(self) -> None:
        """Make them.

        Raises:
            UserError: if nothing could be built.
        """
        none_fits, every_fits = self._fits("none", self._num_layers), self._fits("full", 0)
        if every_fits and not none_fits:  # else nothing in between can fit, or be faster than both
            self._skip_as_many_as_fit("full", 0)
            full = self._search.found.fastest
            assert full is not None, "every layer fits"
            if self._fits("selective", 0):
                least = self._least_worth_it(full)
                if least < self._num_layers and self._fits("selective", least):
                    self._skip_as_many_as_fit("selective", least)
        if not self._search.found.needs:
            raise UserError(next(reversed(self._search.found.refused.values())))

    def _skip_as_many_as_fit(self, mode: Mode, fits: int) -> None:
        """Narrow down the largest number of skipped layers that fits, from where the memory would run out.

        The first skipped layers may cost nothing, as the peak is elsewhere, and each of the last ones costs most.
        Linear interpolation between the ends of the interval therefore never overestimates, and is tried first; linear
        extrapolation from the last two choices on either side never underestimates, and is tried next. If neither
        gives a number, the search bisects.
        """
        beyond, below, above = self._num_layers, fits, self._num_layers
        while beyond - fits > 1:
            sides = [(one, other) for one, other in ((below, fits), (beyond, above)) if one < other]
            told = [self._end_of_room(mode, *side) for side in sides or [(fits, beyond)]]
            ends = [end for end in told if end is not None]
            guess = math.floor(min(ends, default=(fits + beyond) / 2))
            tried = min(max(guess, fits + 1), beyond - 1)
            if self._fits(mode, tried):
                below, fits = fits, tried
            else:
                above, beyond = beyond, tried

    def _end_of_room(self, mode: Mode, fewer: int, more: int) -> float | None:
        """Return the number of skipped layers at which memory ends, by a line through two choices; or None."""
        one, other = self._need(mode, fewer), self._need(mode, more)
        if one is None or other is None:
            return None
        room, less = self._room(one), self._room(other)
        return fewer + room / (room - less) * (more - fewer) if less < room else None

    def _room(self, need: Need) -> float:
        """Return the bytes left of device or host memory, whichever has less left."""
        limits = self._limits
        return min(limits.device_bytes - need.device_bytes, limits.host_bytes - need.host_bytes)

    def _least_worth_it(self, full: int) -> int:
        """Return how many layers selective checkpointing has to skip to be faster than the best of full.

        Assumes that each skipped layer saves the same time; only there is selective checkpointing estimated again.
        """
        seconds = self._search.found.needs[full].seconds
        selective, none = self._need("selective", 0), self._need("none", self._num_layers)
        if not seconds or selective is None:
            return self._choices[full][_SKIPPED]
        if none is None or seconds > selective.seconds or none.seconds >= selective.seconds:
            return 0
        saved = (selective.seconds - none.seconds) / self._num_layers
        return math.floor((selective.seconds - seconds) / saved) + 1

    def _fits(self, mode: Mode, skipped: int) -> bool:
        need = self._need(mode, skipped)
        return need is not None and need.fits

    def _need(self, mode: Mode, skipped: int) -> Need | None:
        """Return the needs of a choice, all layers skipped being none; None if it cannot be built."""
        choice = _NONE if skipped == self._num_layers else {_MODE: mode, _SKIPPED: skipped}
        place = self._place_of((self._choices.index(choice),))
        need = None if place is None else self._search.estimate(place, then=())
        return need if isinstance(need, Need) else None
