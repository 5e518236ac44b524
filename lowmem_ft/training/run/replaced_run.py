"""What a run writes into its folder, and the run that another one replaces there.

A run that is replaced is moved into ``replaced-N/``, and deleted once the new one has succeeded. Files of other people
are neither moved nor deleted, whatever their names and wherever they lie: ``saved_files.py`` tells them.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.user_paths import expand_user
from lowmem_ft.recipe import load_recipe
from lowmem_ft.recipe.rules.output_folder import METRICS_FILE, RECIPE_FILE, holds_a_run
from lowmem_ft.recipe.rules.path_checks import MODEL_FOLDER
from lowmem_ft.training.checkpoints.atomic_io import incomplete_name
from lowmem_ft.training.checkpoints.checkpoint_folders import SUSPECT, is_own_checkpoint
from lowmem_ft.training.checkpoints.saved_files import delete_saved, move_saved

logger = logging.getLogger(__name__)

LOGS_FOLDER = "logs"
REHEARSAL_FILE = "rehearsal.json"
"""Of the command ``rehearse``, for the report of the run to come: no run replaces it."""
_CHECKPOINT = re.compile(rf"checkpoint-\d+(\.incomplete|{re.escape(SUSPECT)})?")
_ALLOCATOR = re.compile(r"out-of-memory(-\d+)?\.json(\.incomplete)?")
_REPLACED = re.compile(r"replaced-(\d+)")


def allocator_file(process_index: int) -> str:
    """What CUDA's allocator held when a run's memory ran out, in segments and blocks: each process has a file."""
    return f"out-of-memory-{process_index}.json" if process_index else "out-of-memory.json"


def run_files(path: Path) -> list[Path]:
    """The files and folders of a run that is in a folder; others may lie in those folders."""
    files = [folder for folder in _checkpoints(path) if is_own_checkpoint(folder)]
    if holds_a_run(path):
        names = (
            RECIPE_FILE,
            METRICS_FILE,
            MODEL_FOLDER,
            f"{LOGS_FOLDER}/{_tracker_project(path)}",
        )
        targets = [path / name for name in names]
        files += [file for file in (*targets, *map(incomplete_name, targets)) if file.exists()]
        files += sorted(file for file in path.iterdir() if _ALLOCATOR.fullmatch(file.name))
    return files


def in_the_way(path: Path) -> list[Path]:
    """What is not of our making, though it has the name of something that a run writes."""
    targets = [path / name for name in (RECIPE_FILE, METRICS_FILE, MODEL_FOLDER)]
    own = set(run_files(path))
    return [file for file in (*targets, *_checkpoints(path)) if file.exists() and file not in own]


def move_aside(path: Path, files: Iterable[Path]) -> Path:
    """Move files of a run's folder into a new ``replaced-N/`` in it.

    Returns:
        The new folder.

    Raises:
        OSError: if they cannot be moved.
    """
    numbers = [int(found[1]) for folder in path.iterdir() if (found := _REPLACED.fullmatch(folder.name))]
    aside = path / f"replaced-{max(numbers, default=0) + 1}"
    for file in files:
        move_saved(file, aside / file.relative_to(path))
    return aside


def replaced_runs(path: Path) -> list[Path]:
    """The folders of runs that were moved aside and nothing else was put into, oldest first."""
    folders = [folder for folder in path.glob("replaced-*") if _REPLACED.fullmatch(folder.name)]
    return sorted(filter(_has_nothing_else, folders), key=lambda folder: int(folder.name.partition("-")[2]))


def delete_replaced_runs(path: Path) -> None:
    """Delete what was moved aside, now that something better stands in its place."""
    for folder in replaced_runs(path):
        for file in folder.iterdir():
            delete_saved(file)
        if not any(folder.iterdir()):
            folder.rmdir()
            logger.info("Deleted %s, the run that this one replaces.", folder)


def refuse_to_replace_inputs(files: Iterable[Path], inputs: dict[str, str | None]) -> None:
    """Refuse to replace a run by one that starts from what is in it.

    Args:
        files: of the run that would be replaced.
        inputs: by their recipe keys.

    Raises:
        UserError: if one of the inputs lies in one of the files.
    """
    replaced = {file.resolve() for file in files}
    for key, value in inputs.items():
        place = Path(os.path.realpath(expand_user(value))) if value else None
        if place is not None and replaced & {place, *place.parents}:
            raise UserError(
                f"training.overwrite_output_dir=true would replace {value}, which {key} reads. Choose another "
                "training.output_dir."
            )


def _checkpoints(path: Path) -> list[Path]:
    return sorted(folder for folder in path.glob("checkpoint-*") if _CHECKPOINT.fullmatch(folder.name))


def _tracker_project(path: Path) -> str:
    """The folder in ``logs/`` that TensorBoard got from the run."""
    try:
        return load_recipe(str(path / RECIPE_FILE)).training.project
    except UserError:
        return "lowmem_ft"  # the default; a recipe that this version cannot read names no other


def _has_nothing_else(folder: Path) -> bool:
    names = {RECIPE_FILE, METRICS_FILE, MODEL_FOLDER, LOGS_FOLDER}
    names |= {incomplete_name(Path(name)).name for name in names}
    patterns = _CHECKPOINT, _ALLOCATOR
    return all(
        file.name in names or any(pattern.fullmatch(file.name) for pattern in patterns)
        for file in folder.iterdir()
    )
