"""Which layers are checkpointed, all other knobs as the recipe has them: ``checkpointing.mode=auto``.

Every layer that is left alone costs the bytes it keeps and saves the seconds of its second forward pass. A choice is
a mode and how many of the last layers it leaves alone. Without checkpointing nothing is computed again; where that does
not fit, the most layers are found that may be left alone with each mode, and what a step takes decides between them.
That more layers left alone take no less memory and no more time is what makes the search short;
``tests/planner/test_automatic_checkpointing.py`` holds it against estimates. What is chosen has been estimated in full.

The layers left alone are the last ones, in models whose layers differ too (local and global attention in turn, dense
layers before experts). Backward reaches them first, so that their activations are gone while all others are recomputed:
no other choice of as many alike layers takes less. Where layers alternate, the last n are a mixture of all kinds; to
pick one kind would only pay where its seconds for a byte are much better, as with very long rows of global attention,
and every kind of stack would need a knob of its own. Experts after dense layers are the last layers anyway.
"""

from __future__ import annotations

import dataclasses
import math
import time
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
from lowmem_ft.planner.planning import OnProgress, PlanProgress, need_from, only_looking, smallest_card
from lowmem_ft.planner.search import Limits, Need
from lowmem_ft.recipe import Recipe, check_recipe
from lowmem_ft.recipe.rules.conflicts import recipe_problems
from lowmem_ft.system.ctrl_c import CtrlC
from lowmem_ft.techniques.config import CheckpointingConfig

Mode = Literal["full", "selective"]

MODES = ("none", "selective", "full")
"""From the least that is computed again to the most."""

NO_LAYER, EVERY_LAYER = CheckpointingConfig(mode="none"), CheckpointingConfig(mode="full")

EVERY_SELECTIVE = CheckpointingConfig(mode="selective")

_LEAST_GAIN = 0.001
"""Of a step's seconds, that is worth a word."""


@only_looking()
def plan_checkpointing(
    recipe: Recipe,
    budget: Budget | None = None,
    gpu: str | Gpu | None = None,
    *,
    on_progress: OnProgress = lambda progress: None,
) -> MemoryPlan:
    """The checkpointed layers with which a step is fastest inside a budget, and nothing else of a recipe changed.

    The losses and gradients are the same bit for bit, whatever is chosen. Where no clock tells seconds, on a processor,
    the fewest layers are recomputed.

    Args:
        recipe: its ``checkpointing`` counts for nothing; it is ``mode=auto`` as a rule.
        budget: what may be used; None: the recipe's own.
        gpu: where, as for :func:`lowmem_ft.estimate_memory`.
        on_progress: called before each estimate.

    Returns:
        The plan, its recipe with a mode and a number of layers; where nothing fits, the nearest, with what is missing.

    Raises:
        RecipeError: if the recipe has conflicts.
        UserError: if there is neither a budget nor a GPU, a budget cannot be had, or no choice runs on the device.
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
    with CtrlC() as ctrl_c:
        choices = _Choices(recipe=asked, target=target, ctrl_c=ctrl_c, on_progress=on_progress)
        choices.try_all()
        found = choices.concluded(recipe)
        card = None if found.fits else smallest_card(found, target)
    return dataclasses.replace(found, smallest_gpu=card, seconds=time.perf_counter() - start)


def chosen_in_words(found: MemoryPlan) -> str:
    """What was chosen, as a line of a log: ``checkpointing.mode=auto: full, skip_last_layers=12 (fits with 0.8 ...)``.

    Args:
        found: by :func:`plan_checkpointing`.
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
        words = [f"the least that it can choose, which {lacks}"]
        words += [f"{found.smallest_gpu} would do"] if found.smallest_gpu is not None else []
    return f"checkpointing.mode=auto: {config.mode}{skipped} ({', '.join([*words, *_gain(found)])})"


def _gain(found: MemoryPlan) -> list[str]:
    """How much faster it is than with every layer checkpointed, where that was estimated and differs."""
    every = {"checkpointing.mode": EVERY_LAYER.mode}
    seconds = [choice.step_seconds for choice in found.alternatives if dict(choice.overrides) == every]
    if found.estimate.step is None or not seconds or not seconds[0]:
        return []
    gain = 1 - found.estimate.step.seconds / seconds[0]
    return [f"{100 * gain:.1f} % faster than every layer checkpointed"] if gain >= _LEAST_GAIN else []


@dataclass(kw_only=True)
class _Choices:
    """What each choice needs, found out once.

    Args:
        recipe: with all other knobs.
        target: where.
        ctrl_c: asked before each estimate.
        on_progress: told before each estimate.
        needs: of each choice so far; a text says why it cannot be built.
    """

    recipe: Recipe
    target: Target
    ctrl_c: CtrlC
    on_progress: OnProgress
    needs: dict[CheckpointingConfig, Need | str] = field(default_factory=dict)

    def try_all(self) -> None:
        """Estimate what has to be known to choose."""
        none_fits = self._fits(NO_LAYER)
        if not self._fits(EVERY_LAYER) or none_fits:
            return  # in between nothing can fit, or be faster than both
        self._leave_alone_as_many_as_fit("full", 0)
        if self._fits(EVERY_SELECTIVE):
            least = self._least_worth_it()
            if least < self.target.shape.num_layers and self._fits(self._leaving(least, "selective")):
                self._leave_alone_as_many_as_fit("selective", least)

    def concluded(self, recipe: Recipe) -> MemoryPlan:
        """The best that was found, or the nearest.

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
        """Narrow down the most layers, by where the room would end.

        The first layers left alone may cost nothing, as the peak is elsewhere, and each of the last costs most. So the
        room does not end before an even spread from here to what is beyond has it end, which is tried first, and not
        after the two last choices on either side would have it end, which is tried then. Half of what is between goes
        where neither is told.
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
        """With how many layers left alone nothing would be left, as two choices tell; None if they do not."""
        room, less = (self._room(self._leaving(layers, mode)) for layers in (fewer, more))
        if room is None or less is None or less >= room:
            return None
        return fewer + room / (room - less) * (more - fewer)

    def _leaving(self, layers: int, mode: Mode) -> CheckpointingConfig:
        """A mode for all layers but so many of the last ones."""
        if layers == self.target.shape.num_layers:
            return NO_LAYER
        return CheckpointingConfig(mode=mode, skip_last_layers=layers)

    def _least_worth_it(self) -> int:
        """How many layers selective checkpointing has to leave alone to be faster than the best so far.

        Taken that each of them saves as much; a second estimate of selective checkpointing is asked for only there.
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
        """By the recipe's rules, which cost nothing, then by an estimate in full."""
        recipe = self._with(config)
        if problems := recipe_problems(recipe):
            return " ".join(problems)
        self.ctrl_c.check()
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
        """By seconds; where they are equal, or nobody knows them, by what is computed again."""
        need = self.needs[config]
        assert isinstance(need, Need), "only what was estimated is compared"
        again = 0 if config.mode == "none" else self.target.shape.num_layers - config.skip_last_layers
        return need.seconds, again, MODES.index(config.mode)

    def _missing(self, config: CheckpointingConfig) -> int:
        need = self.needs[config]
        assert isinstance(need, Need), "only what was estimated is compared"
        return sum(self.target.limits.missing(need.device_bytes, need.host_bytes))


def _refuse_without_limit(recipe: Recipe, gpu: str | Gpu | None) -> None:
    """Refuse to choose for whatever this machine's processor has free, where nobody has asked for it."""
    budget, use_cpu = recipe.budget, recipe.training.use_cpu
    is_limited = use_cpu or gpu is not None or budget.device is not None or budget.host is not None
    if is_limited or choose_gpu(None, budget, use_cpu=False)[0] is not None:
        return
    raise UserError(
        "checkpointing.mode=auto is chosen for a budget or a GPU, got neither, and this machine has no GPU. Set "
        "budget=24GiB, name a GPU with --gpu NAME, or set checkpointing.mode=full."
    )


def _room(limits: Limits, device_bytes: float, host_bytes: float) -> float:
    """What is left of the memory that is shorter."""
    return min(limits.device_bytes - device_bytes, limits.host_bytes - host_bytes)


def _or_infinite(num_bytes: int | None) -> float:
    return math.inf if num_bytes is None else num_bytes


def _overrides(config: CheckpointingConfig) -> dict[str, str | int]:
    """What of it is set, beside the mode."""
    skipped = {"checkpointing.skip_last_layers": config.skip_last_layers} if config.skip_last_layers else {}
    return {"checkpointing.mode": config.mode, **skipped}


def _choice(config: CheckpointingConfig, estimate: MemoryEstimate) -> Choice:
    return Choice(
        overrides=_overrides(config),
        device_bytes=estimate.process_high_bytes,
        host_bytes=estimate.host_peak_bytes,
        step_seconds=None if estimate.step is None else estimate.step.seconds,
    )
