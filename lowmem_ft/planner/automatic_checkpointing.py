"""Choice of the layers to checkpoint, with all other knobs as in the recipe: ``checkpointing.mode=auto``.

Each layer that is not checkpointed costs the bytes of its activations and saves the seconds of its second forward pass.
A choice is a mode and the number of last layers that it skips. Without checkpointing nothing is recomputed; if that
does not fit, the search finds for each mode the largest number of layers that can be skipped, and the step time decides
between the two. The search is short because skipping more layers never takes less memory or more time;
``tests/planner/test_automatic_checkpointing.py`` checks this against estimates. The choice has been estimated in full.

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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from lowmem_ft.budget import Budget
from lowmem_ft.catalog.gpu_spec import Gpu
from lowmem_ft.estimator.device_target import choose_gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.memory.memory_estimate import MemoryEstimate
from lowmem_ft.planner.memory_plan import Choice, Counts, MemoryPlan
from lowmem_ft.planner.plan_target import Target
from lowmem_ft.planner.planning import OnProgress, PlanProgress, need_from, only_looking, smallest_fitting_gpu
from lowmem_ft.planner.search import Limits, Need
from lowmem_ft.recipe import Recipe, check_recipe
from lowmem_ft.recipe.rules.conflicts import recipe_problems
from lowmem_ft.system.signals import stops_remembered
from lowmem_ft.techniques.config import CheckpointingConfig

Mode = Literal["full", "selective"]

MODES = ("none", "selective", "full")
"""Modes from the least recomputation to the most."""

NO_LAYER, EVERY_LAYER = CheckpointingConfig(mode="none"), CheckpointingConfig(mode="full")

EVERY_SELECTIVE = CheckpointingConfig(mode="selective")

_LEAST_GAIN = 0.001
"""Smallest gain, as a share of the step's seconds, that is mentioned."""


@only_looking()
def plan_checkpointing(
    recipe: Recipe,
    budget: Budget | None = None,
    gpu: str | Gpu | None = None,
    *,
    on_progress: OnProgress = lambda progress: None,
) -> MemoryPlan:
    """Return the plan whose checkpointed layers make a step fastest inside a budget, with nothing else changed.

    Losses and gradients are the same bit for bit, whatever is chosen. On a processor, which has no timing model, the
    plan recomputes the fewest layers.

    Args:
        recipe: its ``checkpointing`` is ignored; normally it is ``mode=auto``.
        budget: what may be used; None: the recipe's own.
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
    asked = dataclasses.replace(
        recipe,
        checkpointing=CheckpointingConfig(mode="auto"),
        budget=recipe.budget if budget is None else budget,
    )
    check_recipe(asked)
    _refuse_without_limit(asked, gpu)
    target = Target.of(asked, gpu)
    with stops_remembered() as raise_if_stopped:
        choices = _Choices(
            recipe=asked, target=target, raise_if_stopped=raise_if_stopped, on_progress=on_progress
        )
        choices.try_all()
        found = choices.concluded(recipe)
        smallest = None if found.fits else smallest_fitting_gpu(found, target)
    return dataclasses.replace(found, smallest_gpu=smallest, seconds=time.perf_counter() - start)


def chosen_in_words(found: MemoryPlan) -> str:
    """Return the choice as a log line: ``checkpointing.mode=auto: full, skip_last_layers=12 (fits with 0.8 ...)``.

    Args:
        found: the plan returned by :func:`plan_checkpointing`.
    """
    config, estimate = found.recipe.checkpointing, found.estimate
    skipped = f", skip_last_layers={config.skip_last_layers}" if config.skip_last_layers else ""
    spare = _room(
        Limits(
            device_bytes=_or_infinite(estimate.budget.device_bytes),
            host_bytes=_or_infinite(estimate.budget.host_bytes),
        ),
        estimate.process_peak_bytes,
        estimate.host_peak_bytes,
    )
    words = [f"fits with {format_bytes(int(spare))} to spare" if math.isfinite(spare) else "fits"]
    if not found.fits:
        missing = found.missing_device_bytes + found.missing_host_bytes
        lacks = f"lacks {format_bytes(missing)} with 6 % to spare" if missing else "does not fit"
        words = [f"the smallest that it can choose, which {lacks}"]
        words += [f"{found.smallest_gpu} would do"] if found.smallest_gpu is not None else []
    return f"checkpointing.mode=auto: {config.mode}{skipped} ({', '.join([*words, *_gain(found)])})"


def _gain(found: MemoryPlan) -> list[str]:
    """Return how much faster the choice is than checkpointing every layer; empty if not estimated or about equal."""
    every = {"checkpointing.mode": EVERY_LAYER.mode}
    seconds = [choice.step_seconds for choice in found.alternatives if dict(choice.overrides) == every]
    if found.estimate.step is None or not seconds or not seconds[0]:
        return []
    gain = 1 - found.estimate.step.seconds / seconds[0]
    return [f"{100 * gain:.1f} % faster than every layer checkpointed"] if gain >= _LEAST_GAIN else []


@dataclass(kw_only=True)
class _Choices:
    """The needs of each choice, each estimated once.

    Args:
        recipe: the recipe, with all other knobs.
        target: the device, its limits and the model.
        raise_if_stopped: called before each estimate.
        on_progress: called before each estimate.
        needs: needs of each choice so far; a string says why it cannot be built.
    """

    recipe: Recipe
    target: Target
    raise_if_stopped: Callable[[], None]
    on_progress: OnProgress
    needs: dict[CheckpointingConfig, Need | str] = field(default_factory=dict)

    def try_all(self) -> None:
        """Estimate everything that the choice depends on."""
        none_fits = self._fits(NO_LAYER)
        if not self._fits(EVERY_LAYER) or none_fits:
            return  # nothing in between can fit, or be faster than both
        self._leave_alone_as_many_as_fit("full", 0)
        if self._fits(EVERY_SELECTIVE):
            least = self._least_worth_it()
            if least < self.target.shape.num_layers and self._fits(self._leaving(least, "selective")):
                self._leave_alone_as_many_as_fit("selective", least)

    def concluded(self, recipe: Recipe) -> MemoryPlan:
        """Return the best choice found, or the nearest to fitting.

        Raises:
            UserError: if nothing could be built.
        """
        needs = {config: need for config, need in self.needs.items() if isinstance(need, Need)}
        if not needs:
            raise UserError(str(self.needs[EVERY_LAYER]))
        fitting = sorted((config for config in needs if needs[config].fits), key=self._order)
        best = fitting[0] if fitting else min(needs, key=self._missing)
        missing = self.target.limits.missing(needs[best].device_bytes, needs[best].host_bytes)
        return MemoryPlan(
            recipe=dataclasses.replace(self._with(best), budget=recipe.budget),
            estimate=needs[best].estimate,
            fits=needs[best].fits,
            overrides=_overrides(best),
            alternatives=tuple(_choice(config, needs[config].estimate) for config in fitting[1:]),
            counts=Counts(
                estimated=len(needs),
                refused=len(self.needs) - len(needs),
                beyond_bytes=0,
                beyond_seconds=0,
                left=0,
            ),
            missing_device_bytes=missing[0],
            missing_host_bytes=missing[1],
        )

    def _leave_alone_as_many_as_fit(self, mode: Mode, fits: int) -> None:
        """Narrow down the largest number of skipped layers that fits, from where the memory would run out.

        The first skipped layers may cost nothing, as the peak is elsewhere, and each of the last ones costs most.
        Linear interpolation between the ends of the interval therefore never overestimates, and is tried first; linear
        extrapolation from the last two choices on either side never underestimates, and is tried next. If neither
        gives a number, the search bisects.
        """
        beyond, below, above = self.target.shape.num_layers, fits, self.target.shape.num_layers
        while beyond - fits > 1:
            sides = [(one, other) for one, other in ((below, fits), (beyond, above)) if one < other]
            told = [self._end_of_room(mode, *side) for side in sides or [(fits, beyond)]]
            ends = [end for end in told if end is not None]
            guess = math.floor(min(ends, default=(fits + beyond) / 2))
            tried = min(max(guess, fits + 1), beyond - 1)
            if self._fits(self._leaving(tried, mode)):
                below, fits = fits, tried
            else:
                above, beyond = beyond, tried

    def _end_of_room(self, mode: Mode, fewer: int, more: int) -> float | None:
        """Return the number of skipped layers at which memory ends, by a line through two choices; or None."""
        room, less = (self._room(self._leaving(layers, mode)) for layers in (fewer, more))
        if room is None or less is None or less >= room:
            return None
        return fewer + room / (room - less) * (more - fewer)

    def _leaving(self, layers: int, mode: Mode) -> CheckpointingConfig:
        """Return the config that checkpoints all layers except this many of the last ones."""
        if layers == self.target.shape.num_layers:
            return NO_LAYER
        return CheckpointingConfig(mode=mode, skip_last_layers=layers)

    def _least_worth_it(self) -> int:
        """Return how many layers selective checkpointing has to skip to be faster than the best choice so far.

        Assumes that each skipped layer saves the same time; only there is selective checkpointing estimated again.
        """
        fitting = [config for config, need in self.needs.items() if isinstance(need, Need) and need.fits]
        best = min((config for config in fitting if config.mode == "full"), key=self._order)
        seconds, selective, none = map(self._seconds, (best, EVERY_SELECTIVE, NO_LAYER))
        if not seconds:
            return best.skip_last_layers
        if none is None or selective is None or seconds > selective or none >= selective:
            return 0
        saved = (selective - none) / self.target.shape.num_layers
        return math.floor((selective - seconds) / saved) + 1

    def _seconds(self, config: CheckpointingConfig) -> float | None:
        need = self._need(config)
        return need.seconds if isinstance(need, Need) else None

    def _fits(self, config: CheckpointingConfig) -> bool:
        need = self._need(config)
        return isinstance(need, Need) and need.fits

    def _room(self, config: CheckpointingConfig) -> float | None:
        need = self._need(config)
        if isinstance(need, str):
            return None
        return _room(self.target.limits, need.device_bytes, need.host_bytes)

    def _need(self, config: CheckpointingConfig) -> Need | str:
        if config not in self.needs:
            self.needs[config] = self._asked(config)
        return self.needs[config]

    def _asked(self, config: CheckpointingConfig) -> Need | str:
        """Check the recipe's rules, which cost nothing, then estimate in full."""
        recipe = self._with(config)
        if problems := recipe_problems(recipe):
            return " ".join(problems)
        self.raise_if_stopped()
        self.on_progress(self._progress())
        try:
            return need_from(self.target.estimate(recipe)[0])
        except UserError as error:
            return " ".join(error.problems)

    def _with(self, config: CheckpointingConfig) -> Recipe:
        return dataclasses.replace(self.recipe, checkpointing=config)

    def _progress(self) -> PlanProgress:
        needs = {config: need for config, need in self.needs.items() if isinstance(need, Need)}
        best = min((config for config in needs if needs[config].fits), key=self._order, default=None)
        return PlanProgress(
            combinations=1 + 2 * self.target.shape.num_layers,
            estimated=len(needs),
            best=None if best is None else needs[best].estimate,
        )

    def _order(self, config: CheckpointingConfig) -> tuple[float, int, int]:
        """Return the sort key: seconds; where these are equal or unknown, the number of recomputed layers."""
        need = self.needs[config]
        assert isinstance(need, Need), "only estimates are compared"
        again = 0 if config.mode == "none" else self.target.shape.num_layers - config.skip_last_layers
        return need.seconds, again, MODES.index(config.mode)

    def _missing(self, config: CheckpointingConfig) -> int:
        need = self.needs[config]
        assert isinstance(need, Need), "only estimates are compared"
        return sum(self.target.limits.missing(need.device_bytes, need.host_bytes))


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


def _room(limits: Limits, device_bytes: float, host_bytes: float) -> float:
    """Return the bytes left of device or host memory, whichever has less left."""
    return min(limits.device_bytes - device_bytes, limits.host_bytes - host_bytes)


def _or_infinite(num_bytes: int | None) -> float:
    return math.inf if num_bytes is None else num_bytes


def _overrides(config: CheckpointingConfig) -> dict[str, str | int]:
    """Return the settings of the config: the mode, and the skipped layers if there are any."""
    skipped = {"checkpointing.skip_last_layers": config.skip_last_layers} if config.skip_last_layers else {}
    return {"checkpointing.mode": config.mode, **skipped}


def _choice(config: CheckpointingConfig, estimate: MemoryEstimate) -> Choice:
    return Choice(
        overrides=_overrides(config),
        device_bytes=estimate.process_high_bytes,
        host_bytes=estimate.host_peak_bytes,
        step_seconds=None if estimate.step is None else estimate.step.seconds,
    )
