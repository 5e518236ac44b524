"""Resuming a run with a changed recipe: which settings may differ, and which may not."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from lowmem_ft.foundation.errors import CheckpointError, UserError
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.training.run.replaced_run import RECIPE_FILE

logger = logging.getLogger(__name__)

_MUST_STAY = re.compile(
    r"data\.(?!(path|num_proc|eval_path|eval_split)$)\w+|adapter\.\w+|model\.quantization|training\.seed"
    r"|optimizer\.(?!(state|master|in_backward)$)\w+"
)
"""Settings that decide what a run's data, its weights and its optimizer's state mean. All others may change, including
those of newly enabled techniques.

State is converted to other formats, exactly if both hold float32 weights in full
(``optimizers/state/state_conversion.py``). Paths may change, because a run may move to another machine: model and
tokenizer come from the checkpoint, and other data is detected by its size.
"""

_DECIDES_THE_BASE = re.compile(r"model\.(weights|revision|gguf_file)")
"""Settings that must not change in a run of adapters, whose checkpoints do not hold the model."""

_OF_THE_CALL = {
    f"training.{name}" for name in ("output_dir", "overwrite_output_dir", "resume_from_checkpoint")
}


def refuse_to_continue_another(recipe: Recipe, run: Path) -> None:
    """Refuse a recipe that changes settings which must stay the same; :func:`log_changes` logs all other changes.

    Args:
        recipe: the recipe with which the run is to resume.
        run: the run's folder.

    Raises:
        CheckpointError: if the recipe cannot use the run's data position, weights or optimizer state.
        RecipeError: if the run's own recipe cannot be read.
    """
    changed = _differences(recipe, run)
    if changed.refused:
        raise CheckpointError(
            f"{run} contains a run of another recipe ({'; '.join(changed.refused)}), which this recipe cannot resume. "
            "Change these settings back, or choose another training.output_dir."
        )


def log_changes(recipe: Recipe, run: Path) -> None:
    """Log the settings that differ from those of the resumed run, once nothing prevents resuming it."""
    if changed := _differences(recipe, run).accepted:
        logger.warning("Resuming with other settings: %s.", "; ".join(changed))


def may_continue(recipe: Recipe, run: Path) -> bool:
    """Return whether :func:`refuse_to_continue_another` lets a recipe resume a run."""
    try:
        return not _differences(recipe, run).refused
    except UserError:
        return False


@dataclass(frozen=True)
class _Differences:
    """Differences from the recipe of a run, each in words: those with which it cannot resume, and the others."""

    refused: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()


def _differences(recipe: Recipe, run: Path) -> _Differences:
    file = run / RECIPE_FILE
    if not file.exists():
        return _Differences()
    saved = load_recipe(str(file))
    changed = {
        name: f"{name} was {key.value_in(saved)!r}, is {key.value_in(recipe)!r}"
        for name, key in recipe_keys().items()
        if key.value_in(recipe) != key.value_in(saved) and name not in _OF_THE_CALL
    }
    return _Differences(
        refused=tuple(text for name, text in changed.items() if not _may_change(name, recipe)),
        accepted=tuple(text for name, text in changed.items() if _may_change(name, recipe)),
    )


def _may_change(name: str, recipe: Recipe) -> bool:
    if recipe.adapter.name != "none" and _DECIDES_THE_BASE.fullmatch(name):
        return False
    return _MUST_STAY.fullmatch(name) is None
