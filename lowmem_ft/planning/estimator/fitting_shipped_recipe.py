"""A shipped recipe that fits a GPU, where another recipe of the same model does not."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.planning.estimator.changes import Outlook
from lowmem_ft.planning.estimator.device_target import choose_gpu
from lowmem_ft.planning.estimator.estimate import estimate_memory
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.recipe.shipped.recipes_by_gpu import made_for

MOST_TRIED = 2
"""The most recipes to estimate, at seconds each."""


@dataclass(frozen=True, kw_only=True)
class ShippedRecipe:
    """A shipped recipe that fits, with rows and steps of its own.

    Args:
        settings: the settings to type, such as ``recipe=1b-fp16-t4``.
        trains: what it trains where the other recipe does not, such as ``adapters alone``; empty if both train alike.
        estimate: its estimate on the GPU.
    """

    settings: tuple[str, ...]
    trains: str
    estimate: MemoryEstimate

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as JSON types, with its peaks."""
        estimate = self.estimate.to_json()
        return {"settings": list(self.settings), "device": estimate["device"], "host": estimate["host"]}


def shipped_recipe_that_fits(
    recipe: Recipe, gpu: str | None, *, kept: KeptTraces | None = None, outlook: Outlook | None = None
) -> ShippedRecipe | None:
    """Return the first shipped recipe for such a GPU that fits there with a recipe's model, by its estimate.

    Args:
        recipe: the recipe that does not fit: its model, whether all of it is trained, and the budget.
        gpu: the device, as for ``estimate_memory``.
        kept: traces made before, as for ``estimate_memory``.
        outlook: bounds of the model on the device, which exclude recipes without an estimate; None: use only estimates.

    Returns:
        The recipe; None if none of those tried fits, or the device is a processor.
    """
    chosen, _ = choose_gpu(gpu, recipe.budget, use_cpu=recipe.training.use_cpu)
    num_tried = 0
    for shipped in [] if chosen is None else made_for(chosen, recipe):
        name, *settings = shipped.settings
        with contextlib.suppress(UserError):  # such as a model that one of its techniques does not support
            candidate = load_recipe(name.removeprefix("recipe="), settings)
            if num_tried == MOST_TRIED or (outlook is not None and outlook.cannot_fit(candidate)):
                continue
            num_tried += 1
            estimate = estimate_memory(candidate, gpu, budget=recipe.budget, kept=kept)
            if estimate.fits:
                return ShippedRecipe(settings=shipped.settings, trains=shipped.trains, estimate=estimate)
    return None
