"""Defaults for settings that name a model and no recipe, and names for plans made of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.model_files import limit_of_positions, text_fields
from lowmem_ft.recipe.shipped.fine_tuning_methods import FULL, methods_with
from lowmem_ft.recipe.tree import Recipe

TOKENS = 2048
"""Tokens per row, where the length of the data's rows is not known."""

_ROWS = {"training.per_device_train_batch_size", "training.gradient_accumulation_steps"}


def with_defaults_of_plan(settings: Sequence[str]) -> list[str]:
    """Add to settings that name a model and no recipe what a plan needs: a step of 16 rows of 2048 tokens.

    Args:
        settings: the settings as typed.

    Returns:
        The defaults that they do not set themselves, then the settings. Rows are shorter if the model is known, on this
        machine or in the catalogue, to take fewer tokens. Settings of adapters alone, or ``model.quantization=nf4``,
        mean LoRA, as they do for an estimate.
    """
    values = {key: value for key, _, value in (setting.partition("=") for setting in settings)}
    defaults = [] if _ROWS & values.keys() else ["training.gradient_accumulation_steps=16"]
    if "data.max_length" not in values:
        defaults.append(f"data.max_length={_length(values.get('model') or values.get('model.name_or_path'))}")
    if "adapter.name" not in values and FULL not in methods_with(settings):
        defaults.append("adapter.name=lora")
    return [*defaults, *settings]


def named_as_planned(recipe: Recipe, settings: Sequence[str], *where: str) -> Recipe:
    """Return the recipe under a name that is unique among plans of the same model or recipe: it names the run folder.

    Args:
        recipe: the recipe that was planned, or is to be.
        settings: the settings as typed; a name among them stays.
        where: the budget and the GPU.
    """
    if any(setting.partition("=")[0] == "name" for setting in settings):
        return recipe
    model = Path(recipe.model.name_or_path or "")
    of = recipe.name if recipe.name != Recipe.name else model.absolute().name.removesuffix(".gguf")
    words = [of, *(word for word in where if not of.endswith(word))]
    return dataclasses.replace(recipe, name=re.sub(r"[^\w.]+", "-", "-".join(words)).strip("-."))


def _length(model: str | None) -> int:
    limit = limit_of_positions(text_fields(ModelConfig(name_or_path=model)).get)
    return TOKENS if limit is None else min(TOKENS, limit)
