"""Files in a folder that a run of lowmem_ft has saved; all others are a user's own, and never deleted.

A checkpoint lists the files saved in it. A model folder lists nothing, to be like any other: there a file is recognized
by the names that transformers, PEFT and a run write. A file with an unknown name counts as a user's own.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

MANIFEST = "checkpoint.json"
"""Manifest of a checkpoint: it is written last and lists all other files."""

_NAMES = re.compile(
    r"(generation_|adapter_)?config\.json|README\.md"
    r"|(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
    r"|(tokenizer|tokenizer_config|special_tokens_map|added_tokens|chat_template|\w*vocab)\.json"
    r"|(pre|video_pre)?processor_config\.json"
    r"|vocab\.txt|merges\.txt|(\w+\.)?(tokenizer|spiece|sentencepiece|spm|bpe)\.model"
    r"|chat_template\.jinja|additional_chat_templates/\w+\.jinja"
    r"|shard-\d{5}-of-\d{5}-(model|optimizer)-\d{5}\.safetensors"
    r"|(checkpoint|sharded-state)\.json|optimizer-\d{5}\.safetensors|random-state-\d+\.json"
    r"|\.tmp\w{6}"  # of safetensors, which renames it: one is left if the process is killed
    r"|(.+/)?(events\.out\.tfevents\..+|hparams\.yml)"  # of TensorBoard, in logs/
)


_OF_THE_RUN = re.compile(r"shard-.+\.safetensors|optimizer-\d{5}\.safetensors|random-state-\d+\.json")


def _saved_files(folder: Path) -> list[Path]:
    """Return the files in a folder, and in those below it, that a run of lowmem_ft saved."""
    listed = _listed(folder)
    paths = [(path, path.relative_to(folder).as_posix()) for path in _files(folder)]
    return [path for path, name in paths if name in listed or _NAMES.fullmatch(name)]


def _own_files(folder: Path) -> list[Path]:
    """Return all other files, which are a user's own."""
    return sorted(set(_files(folder)) - set(_saved_files(folder)))


def delete_saved(target: Path) -> None:
    """Delete a file that a run wrote, or its files in a folder, together with the folder if nothing else is in it."""
    if not target.is_dir():
        target.unlink(missing_ok=True)
    elif _holds_nothing_else(target):
        shutil.rmtree(target)
    else:
        saved = _saved_files(target)
        for file in saved:
            file.unlink()
        _remove_emptied(saved, target)
        logger.warning("%s is kept, because no run wrote %s in it.", target, _some(_own_files(target)))


def move_saved(source: Path, target: Path) -> None:
    """Move a file that a run wrote, or its files in a folder; a user's own files stay.

    Raises:
        OSError: if a file cannot be moved.
    """
    if source.is_dir() and not _holds_nothing_else(source):
        saved = _saved_files(source)
        _move(saved, source, target)
        _remove_emptied(saved, source)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)


def replace_saved(old: Path, successor: Path) -> None:
    """Delete the saved files of a folder whose successor is complete, and move a user's own files to the successor."""
    if old.is_dir():
        _move(_own_files(old), old, successor)
        shutil.rmtree(old)


def copy_model_files(checkpoint: Path, folder: Path) -> None:
    """Copy the files of a complete checkpoint that belong to its model: all it lists except the state of the run.

    Raises:
        OSError: if a file cannot be copied.
    """
    for name in _listed(checkpoint):
        if not _OF_THE_RUN.fullmatch(name):
            shutil.copyfile(checkpoint / name, folder / name)


def _move(files: Iterable[Path], source: Path, target: Path) -> None:
    """Move files to the same relative paths below another folder, unless a file is already there."""
    for file in files:
        place = target / file.relative_to(source)
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            file.rename(place)


def _holds_nothing_else(folder: Path) -> bool:
    return not _own_files(folder)


def _files(folder: Path) -> list[Path]:
    """Return files and empty folders, which may be a user's own, too."""
    return [
        path
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
    ]


def _remove_emptied(files: Iterable[Path], folder: Path) -> None:
    emptied = {parent for file in files for parent in file.relative_to(folder).parents if parent != Path()}
    for parent in sorted(emptied, key=lambda path: len(path.parts), reverse=True):
        if not any((folder / parent).iterdir()):
            (folder / parent).rmdir()


def _listed(folder: Path) -> set[str]:
    try:
        return set(json.loads((folder / MANIFEST).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _some(files: list[Path]) -> str:
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return f"{', '.join(file.name for file in files[:3])}{more}"
