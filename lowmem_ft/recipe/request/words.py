"""Words of a question: one recipe or a model, ``key=value`` settings, and GPUs as ``--gpu`` takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from lowmem_ft.foundation.catalog.gpu_catalog import ALL_GPUS, CPU, find_gpu, load_gpus, split_count
from lowmem_ft.foundation.errors import RecipeError, UserError
from lowmem_ft.foundation.packages import may_have_gpu
from lowmem_ft.recipe.reading.recipe_files import meant_by
from lowmem_ft.recipe.shipped.fine_tuning_methods import values_by_key

Purpose = Literal["estimate", "plan", "rehearse", "data", "train"]

_NEEDS = {
    "estimate": "An estimate needs one recipe=NAME|PATH, or model=NAME,",
    "plan": "A plan needs one recipe=NAME|PATH, or model=NAME,",
    "rehearse": "A rehearsal needs one recipe=NAME|PATH,",
    "data": "A look at the data needs one recipe=NAME|PATH,",
    "train": "Training needs one recipe=NAME|PATH, or model=X data=X budget=X to plan for;",
}
_TAKES_MODEL_ALONE = ("estimate", "plan")

_ENOUGH_TO_TRAIN = (
    {"model.name_or_path"},
    {"data.path", "data.sources"},
    {"budget.device"},
)
"""Settings that say what to train, on what data, and within what budget: the rest can be chosen."""


def split_words(purpose: Purpose, words: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """Return the recipe's name or path, None if the settings name a model instead; and the settings.

    Raises:
        RecipeError: if there is neither, or more than one recipe.
    """
    choices = [word for word in words if word.startswith("recipe=")]
    settings = tuple(word for word in words if not word.startswith("recipe="))
    if len(choices) == 1 and choices != ["recipe="]:
        return choices[0].partition("=")[2], settings
    if not choices and _is_enough(purpose, settings):
        return None, settings
    seen = " ".join(choices or words) or "nothing"
    meant = meant_by(settings) or (" Write for instance recipe=demo;" if purpose == "train" else "")
    both = purpose in _TAKES_MODEL_ALONE
    lists = "`lowmem-ft recipes` and `lowmem-ft models` list" if both else "`lowmem-ft recipes` lists"
    raise RecipeError(f"{_NEEDS[purpose]} got {seen}.{meant} {lists} the names.")


def _is_enough(purpose: Purpose, settings: Sequence[str]) -> bool:
    keys = values_by_key(settings).keys()
    if purpose == "train":
        return all(keys & names for names in _ENOUGH_TO_TRAIN)
    return purpose in _TAKES_MODEL_ALONE and "model.name_or_path" in keys


def is_for_processor(settings: Sequence[str], gpu: str | None) -> bool:
    """Return whether settings without a recipe are surely for this machine's processor; only torch knows of its GPU."""
    values = values_by_key(settings)
    if gpu == CPU or values.get("training.use_cpu", "").lower() in ("true", "yes", "on"):
        return True
    return gpu is None and "budget.device" not in values and not may_have_gpu()


def gpu_problems(purpose: Purpose, gpu: str | None) -> Iterator[str]:
    """Yield what is wrong with the word after ``--gpu``."""
    if purpose == "plan" and gpu == ALL_GPUS:
        yield "A plan is for one GPU, got --gpu all. Name one, such as --gpu rtx-4090, or a budget."
    elif purpose == "rehearse" and gpu in (ALL_GPUS, CPU):
        yield f"A rehearsal is for one GPU, got --gpu {gpu}. Name one, such as --gpu rtx-4090."
    elif gpu not in (None, ALL_GPUS, CPU):
        names = [name for name in gpu.replace(",", " ").split() if name]
        if len(names) > 1 and any(name in load_gpus() for name in names):
            yield f"--gpu takes one name, or all, got {gpu}. Estimate one at a time, or use --gpu all."
            return
        try:
            find_gpu(split_count(gpu)[1])
        except UserError as error:
            yield from error.problems
