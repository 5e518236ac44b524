"""A shipped recipe that fits a card, where another recipe of the same model does not."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from lowmem_ft.estimator.device_target import choose_gpu
from lowmem_ft.estimator.estimate import estimate_memory
from lowmem_ft.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.memory.memory_estimate import MemoryEstimate
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.recipe.shipped.recipes_by_gpu import made_for

MOST_TRIED = 2
"""Each is an estimate of seconds."""


@dataclass(frozen=True, kw_only=True)
class ShippedRecipe:
    """One that fits, with rows and steps of its own.

    Args:
        settings: what is typed, such as ``recipe=1b-fp16-t4``.
        trains: what it does where the other recipe does not, such as ``adapters alone``; empty if both train alike.
        estimate: of it on the card.
    """

    settings: tuple[str, ...]
    trains: str
    estimate: MemoryEstimate

    def to_json(self) -> dict[str, Any]:
        """The recipe as JSON types, with its peaks."""
        estimate = self.estimate.to_json()
        return {"settings": list(self.settings), "device": estimate["device"], "host": estimate["host"]}


def shipped_recipe_that_fits(
    recipe: Recipe, gpu: str | None, *, kept: KeptTraces | None = None
) -> ShippedRecipe | None:
    """The first shipped recipe made for such a card that fits with a recipe's model, estimated there.

    Args:
        recipe: what does not fit: its model, whether all of it is trained, and the budget.
        gpu: where, as for ``estimate_memory``.
        kept: traces made before, as for ``estimate_memory``.

    Returns:
        The recipe; None if none of the first does, or the device is a processor.
    """
    card, _ = choose_gpu(gpu, recipe.budget, use_cpu=recipe.training.use_cpu)
    for shipped in [] if card is None else made_for(card, recipe)[:MOST_TRIED]:
        name, *settings = shipped.settings
        with contextlib.suppress(UserError):  # such as a model that one of its techniques does not know
            candidate = load_recipe(name.removeprefix("recipe="), settings)
            estimate = estimate_memory(candidate, gpu, budget=recipe.budget, kept=kept)
            if estimate.fits:
                return ShippedRecipe(settings=shipped.settings, trains=shipped.trains, estimate=estimate)
    return None
