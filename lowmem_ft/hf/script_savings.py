"""What a recipe would save in somebody's script by ``hf.attach``, estimated from the recipe of its trainer."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from lowmem_ft.catalog.gpu import Gpu
from lowmem_ft.errors import UserError
from lowmem_ft.estimator import estimate_memory
from lowmem_ft.hf.script_recipe import recipe_from
from lowmem_ft.hf.trainer_kinds import Kind, kind_of, problems_of_kind
from lowmem_ft.memory.estimate import MemoryEstimate
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.conflicts import recipe_problems
from lowmem_ft.training.remediations import Remediation, remediations_for
from lowmem_ft.units import format_bytes

_SWITCHED_IN_PLACE = ("checkpointing.", "loss.", "tiling.", "offload.activations", "offload.optimizer")
"""Keys by which nothing changes but memory and time, and which need no word before a trainer's constructor."""


@dataclass(frozen=True, kw_only=True)
class Savings:
    """A trainer's recipe as its script has it, and with every exact technique that can be attached to it.

    Args:
        settings: that are attached, as they are typed.
        before: the estimate of the recipe as it is.
        after: with them.
    """

    settings: tuple[str, ...]
    before: MemoryEstimate
    after: MemoryEstimate

    def __str__(self) -> str:
        """Both peaks, both times, and the settings."""
        words = f"{format_bytes(self.after.process_peak_bytes)} in place of "
        words += format_bytes(self.before.process_peak_bytes)
        if self.before.step is not None and self.after.step is not None:
            words += (
                f", and {self.after.step.seconds:.3g} s a step in place of {self.before.step.seconds:.3g}"
            )
        return f"{words}, with {shlex.join(self.settings)}; both estimated from a recipe of this trainer"

    def to_json(self) -> dict[str, Any]:
        """The settings, and both peaks and times."""
        return {
            "settings": list(self.settings),
            "process_peak_bytes": [each.process_peak_bytes for each in (self.before, self.after)],
            "step_seconds": [each.step and each.step.seconds for each in (self.before, self.after)],
        }


class TrainerSeen:
    """Keeps the recipe of the last trainer that was about to train, or why there is none."""

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.kind: Kind | None = None
        self.problems: tuple[str, ...] = ()

    def __call__(self, trainer: Any) -> None:
        """Look at a trainer before it trains."""
        try:
            self.kind = kind_of(trainer)
            self.recipe, self.problems = recipe_from(trainer), ()
        except UserError as error:
            self.recipe, self.problems = None, error.problems

    def savings(self, gpu: str | Gpu | None) -> Savings | None:
        """What attaching would save on a GPU; None where there is no recipe, or nothing to attach.

        Args:
            gpu: as for ``estimate_memory``.

        Raises:
            UserError: if the recipe cannot be estimated.
        """
        if self.recipe is None or self.kind is None:
            return None
        before = estimate_memory(self.recipe, gpu)
        settings, lean = _lean(self.recipe, self.kind)
        if not settings:
            return None
        return Savings(settings=settings, before=before, after=estimate_memory(lean, gpu))


def _lean(recipe: Recipe, kind: Kind) -> tuple[tuple[str, ...], Recipe]:
    """The recipe with all that is exact and switched on in place, and the settings that make it so."""
    lean, settings = recipe, {}
    for way in remediations_for(recipe):
        if not all(key.startswith(_SWITCHED_IN_PLACE) for key in way.settings):
            continue
        with_it = way.applied_to(lean)
        if not recipe_problems(with_it) and not any(problems_of_kind(with_it, kind)):
            lean = with_it
            settings.update(way.settings)
    return (Remediation(settings=settings, why="").overrides if settings else ()), lean
