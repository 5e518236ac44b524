"""Resuming a run with a changed recipe: which settings may differ, which may not, and which only if the recipe says so.

The third are kernels of the same mathematics, which round differently (``is_kernel`` of ``foundation/knob.py``). What
``auto`` has chosen, and versions, only a checkpoint knows: :func:`refuse_other_kernels` compares those.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lowmem_ft.data.source_keys import without_paths
from lowmem_ft.foundation.errors import CheckpointError, UserError, raise_problems
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.training.folder.checkpoint_folders import read_manifest
from lowmem_ft.training.folder.replaced_run import RECIPE_FILE

logger = logging.getLogger(__name__)

_MUST_STAY = re.compile(
    r"data\.(?!(path|num_proc|eval_path|eval_split)$)\w+|adapter\.\w+|training\.seed"
    r"|model\.(quantization|add_tokens|add_special_tokens)"
    r"|optimizer\.(?!(state|master|in_backward)$)\w+"
)
"""Settings that decide what a run's data, its weights and its optimizer's state mean. All others may change, including
those of newly enabled techniques.

State is converted to other formats, exactly if both hold float32 weights in full
(``optimizers/chunked/saved_state_conversion.py``). Paths may change, because a run may move to another machine: model
and tokenizer come from the checkpoint, and other data is detected by its tokens.
"""

_DECIDES_THE_BASE = re.compile(r"model\.(weights|revision|gguf_file)")
"""Settings that must not change in a run of adapters, whose checkpoints do not hold the model."""

_CONSENT = "training.resume_with_other_kernels"

_OF_THE_CALL = {
    _CONSENT,
    "training.resume_with_other_data",
    *(f"training.{name}" for name in ("output_dir", "overwrite_output_dir", "resume_from_checkpoint")),
}

_TRANSFORMERS = "transformers' own"


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
    problems = []
    if changed.refused:
        problems.append(
            f"{run} contains a run of another recipe ({'; '.join(changed.refused)}), which this recipe cannot resume. "
            "Change these settings back, or choose another training.output_dir."
        )
    if changed.other_kernels:
        problems.append(_rounds_differently(str(run), "; ".join(changed.other_kernels)))
    raise_problems(problems, CheckpointError)


def refuse_other_kernels(recipe: Recipe, checkpoint: Path, chosen: Mapping[str, str]) -> None:
    """Refuse to resume with other kernels than a checkpoint's, unless the recipe consents; log what changes.

    Args:
        recipe: the recipe with which the run is to resume.
        checkpoint: the checkpoint, of this version or an earlier one, which kept no choice and had none.
        chosen: the choices of the enabled techniques on this machine.

    Raises:
        CheckpointError: if they differ without consent.
    """
    before = read_manifest(checkpoint).get("kernels", {})
    changed = "; ".join(
        f"{key} was {before.get(key, _TRANSFORMERS)}, is {chosen.get(key, _TRANSFORMERS)}"
        for key in sorted({*before, *chosen})
        if before.get(key) != chosen.get(key)
    )
    if changed and not recipe.training.resume_with_other_kernels:
        raise CheckpointError(_rounds_differently(str(checkpoint), changed))
    if changed:
        logger.warning("Resuming with other kernels: %s.", changed)


def _rounds_differently(what: str, changed: str) -> str:
    return (
        f"{what} was computed by other kernels ({changed}), which round differently. Change that back, or let the run "
        f"change with {_CONSENT}=true."
    )


def log_changes(recipe: Recipe, run: Path) -> None:
    """Log the settings that differ from those of the resumed run, once nothing prevents resuming it."""
    if changed := _differences(recipe, run).accepted:
        logger.warning("Resuming with other settings: %s.", "; ".join(changed))


def may_continue(recipe: Recipe, run: Path) -> bool:
    """Return whether :func:`refuse_to_continue_another` lets a recipe resume a run."""
    try:
        changed = _differences(recipe, run)
    except UserError:
        return False
    return not changed.refused and not changed.other_kernels


@dataclass(frozen=True)
class _Differences:
    """Differences from the recipe of a run, in words: with which it cannot resume, or not unasked, and the others."""

    refused: tuple[str, ...] = ()
    other_kernels: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()


def _differences(recipe: Recipe, run: Path) -> _Differences:
    file = run / RECIPE_FILE
    if not file.exists():
        return _Differences()
    saved = load_recipe(str(file))
    refused, other_kernels, accepted = [], [], []
    for name, key in recipe_keys().items():
        before, now = key.value_in(saved), key.value_in(recipe)
        if before == now or name in _OF_THE_CALL:
            continue
        if key.is_kernel:
            may = recipe.training.resume_with_other_kernels or "auto" in (
                before,
                now,
            )  # a checkpoint tells its choice
            found = accepted if may else other_kernels
        else:
            moved = name == "data.sources" and without_paths(before) == without_paths(now)
            found = accepted if moved or _may_change(name, recipe) else refused
        found.append(f"{name} was {before!r}, is {now!r}")
    return _Differences(tuple(refused), tuple(other_kernels), tuple(accepted))


def _may_change(name: str, recipe: Recipe) -> bool:
    if recipe.adapter.name != "none" and _DECIDES_THE_BASE.fullmatch(name):
        return False
    return _MUST_STAY.fullmatch(name) is None
