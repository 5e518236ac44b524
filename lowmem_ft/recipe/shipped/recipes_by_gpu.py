"""Shipped recipes made for a GPU, for users whose own recipe the GPU cannot run or has no room for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.hub_names import hub_id_of
from lowmem_ft.models.files.model_files import least_weights
from lowmem_ft.recipe.loading import load_recipe
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.shipped.needs import RecipeNeeds, needs_of_shipped_recipes
from lowmem_ft.recipe.tree import Recipe

ALIKE_SIZES = (0.5, 1.25)
"""Range of sizes, relative to its own model's, in which a recipe is worth an estimate with another model."""

_HOW_IT_IS_READ = ("model.revision", "model.gguf_file", "model.trust_remote_code")
_BUDGET = ("budget.device", "budget.host")


@dataclass(frozen=True, kw_only=True)
class MadeForGpu:
    """A shipped recipe for a model, on a GPU like the one that it names.

    Args:
        settings: the settings to type: ``recipe=NAME``, ``model=MODEL`` if the recipe's own is another, and the budget.
        needs: its needs with its own model, on its own GPU.
        is_own_model: whether the model is the recipe's own.
        trains: what it trains where the other recipe does not, such as ``adapters alone``; empty if both train alike.
    """

    settings: tuple[str, ...]
    needs: RecipeNeeds
    is_own_model: bool
    trains: str


def made_for(gpu: Gpu, recipe: Recipe) -> list[MadeForGpu]:
    """Return shipped recipes that may train a recipe's model on a GPU: those that train it alike first, then its own.

    Args:
        gpu: the GPU; recipes made for one that is no larger and computes with no more types are included.
        recipe: the model, and whether all of it is trained.

    Returns:
        The recipes; among those that train it alike, one that takes more of a GPU first: it streams and recomputes
        less.
    """

    def rank(shipped: MadeForGpu) -> tuple[bool, bool, int]:
        return bool(shipped.trains), not shipped.is_own_model, -shipped.needs.process_peak_bytes

    return sorted(_candidates(gpu, recipe), key=rank)


def _candidates(gpu: Gpu, recipe: Recipe) -> Iterator[MadeForGpu]:
    wanted = hub_id_of(recipe.model.name_or_path or "")
    smallest, largest = ALIKE_SIZES
    for name, needs in needs_of_shipped_recipes().items():
        its_gpu = load_gpus().get(needs.gpu)  # no GPU for a processor
        if (
            its_gpu is None
            or its_gpu.memory_bytes > gpu.memory_bytes
            or its_gpu.has_bfloat16 > gpu.has_bfloat16
        ):
            continue
        shipped = load_recipe(name)
        is_own = hub_id_of(shipped.model.name_or_path or "") == wanted
        own_size = _size(shipped.model)
        if is_own or smallest * own_size <= _size(recipe.model) <= largest * own_size:
            other = (
                () if is_own else (f"model={recipe.model.name_or_path}", *_set_in(recipe, _HOW_IT_IS_READ))
            )
            trains = "adapters alone" if shipped.adapter.name != "none" else "all weights"
            yield MadeForGpu(
                settings=(f"recipe={name}", *other, *_set_in(recipe, _BUDGET)),
                needs=needs,
                is_own_model=is_own,
                trains="" if shipped.adapter.name == recipe.adapter.name else trains,
            )


def _set_in(recipe: Recipe, keys: Sequence[str]) -> list[str]:
    """Return those keys that a recipe says a value of, as settings."""
    return [key.setting_in(recipe) for path in keys if (key := recipe_keys()[path]).is_set_in(recipe)]


def _size(model: ModelConfig) -> int:
    """Return the elements of its embedding and MLPs; 0 if the model is not known."""
    return sum(least_weights(model))
