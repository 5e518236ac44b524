"""The files that a run writes into its folder, and the replacement of an earlier run there.

A replaced run is moved into ``replaced-N/``, and deleted once the new one has succeeded. Files that no run wrote are
neither moved nor deleted, whatever their names and places: ``own_files.py`` tells them apart.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.system.atomic_write import incomplete_name
from lowmem_ft.foundation.user_paths import expand_user
from lowmem_ft.recipe import load_recipe
from lowmem_ft.recipe.checks.path_checks import MODEL_FOLDER
from lowmem_ft.recipe.rules.output_folder import METRICS_FILE, RECIPE_FILE, holds_a_run
from lowmem_ft.training.folder.checkpoint_folders import SUSPECT, is_own_checkpoint
from lowmem_ft.training.folder.generations_file import GENERATIONS_FILE
from lowmem_ft.training.folder.own_files import delete_saved, move_saved

logger = logging.getLogger(__name__)

LOGS_FOLDER = "logs"
REHEARSAL_FILE = "rehearsal.json"
"""File that the command ``rehearse`` writes for the report of the later run; no run replaces it."""
PROFILE_FILE, PROFILE_TABLE = "step-profile.json", "step-profile.txt"
PROFILE_TRACE = "step-profile.trace.json.gz"
"""Files of ``training.profile_steps``: for the report, for people, and for Perfetto."""
_FILES = (RECIPE_FILE, METRICS_FILE, GENERATIONS_FILE, PROFILE_FILE, PROFILE_TABLE, PROFILE_TRACE)
_CHECKPOINT = re.compile(rf"checkpoint-\d+(\.incomplete|{re.escape(SUSPECT)})?")
_ALLOCATOR = re.compile(r"out-of-memory(-\d+)?\.json(\.incomplete)?")
_REPLACED = re.compile(r"replaced-(\d+)")


def allocator_file(process_index: int) -> str:
    """Return the name of a process's file with the segments and blocks of CUDA's allocator when its memory ran out."""
    return f"out-of-memory-{process_index}.json" if process_index else "out-of-memory.json"


def run_files(path: Path) -> list[Path]:
    """Return the files and folders of the run in a folder; those folders may also hold other files."""
    files = [folder for folder in _checkpoints(path) if is_own_checkpoint(folder)]
    if holds_a_run(path):
        names = (*_FILES, MODEL_FOLDER, f"{LOGS_FOLDER}/{_tracker_project(path)}")
        targets = [path / name for name in names]
        files += [file for file in (*targets, *map(incomplete_name, targets)) if file.exists()]
        files += sorted(file for file in path.iterdir() if _ALLOCATOR.fullmatch(file.name))
    return files


def in_the_way(path: Path) -> list[Path]:
    """Return files that no run of lowmem_ft wrote, although they have the name of something that a run writes."""
    targets = [path / name for name in (*_FILES, MODEL_FOLDER)]
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
    """Return the folders of runs that were moved aside, if they hold nothing else, oldest first."""
    folders = [folder for folder in path.glob("replaced-*") if _REPLACED.fullmatch(folder.name)]
    return sorted(filter(_has_nothing_else, folders), key=lambda folder: int(folder.name.partition("-")[2]))


def delete_replaced_runs(path: Path) -> None:
    """Delete runs that were moved aside, after the run that replaces them has succeeded."""
    for folder in replaced_runs(path):
        for file in folder.iterdir():
            delete_saved(file)
        if not any(folder.iterdir()):
            folder.rmdir()
            logger.info("Deleted %s, the run that this one replaces.", folder)


def refuse_to_replace_inputs(files: Iterable[Path], inputs: dict[str, str | None]) -> None:
    """Refuse to replace a run with one that reads files from it.

    Args:
        files: files and folders of the run that would be replaced.
        inputs: input paths by their recipe keys.

    Raises:
        UserError: if one of the inputs is in one of the files.
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
    """Return the name of the folder in ``logs/`` that the run's TensorBoard tracker wrote."""
    try:
        return load_recipe(str(path / RECIPE_FILE)).training.project
    except UserError:
        return "lowmem_ft"  # the default; a recipe that this version cannot read names no other


def _has_nothing_else(folder: Path) -> bool:
    names = {*_FILES, MODEL_FOLDER, LOGS_FOLDER}
    names |= {incomplete_name(Path(name)).name for name in names}
    patterns = _CHECKPOINT, _ALLOCATOR
    return all(
        file.name in names or any(pattern.fullmatch(file.name) for pattern in patterns)
        for file in folder.iterdir()
    )
