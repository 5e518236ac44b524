"""Checks of the files that options name to be written, before time is spent on what goes into them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path


def file_problems(options: argparse.Namespace, *names: str) -> Iterator[str]:
    """Yield why files could not be written, as far as that is known.

    Args:
        options: the command's, ``--overwrite`` among them.
        names: the options that name files to write; ``--json -`` is stdout.
    """
    option_by_file: dict[Path, str] = {}
    for name in names:
        file = getattr(options, name)
        if file is None or (name, file) == ("json", "-"):
            continue
        path = Path(file)
        other = option_by_file.setdefault(path.absolute(), name)
        if problem := _write_problem(name, file, path, overwrite=options.overwrite):
            yield problem
        elif other != name:
            yield f"--{other} and --{name} need different files, got {file} for both. Name another."


def _write_problem(name: str, file: str, path: Path, *, overwrite: bool) -> str | None:
    """Return why a file could not be written; an empty one may be replaced without ``--overwrite``."""
    if path.is_dir():
        return f"--{name} names a file, got the folder {file or repr(file)}. Name a file in it."
    parent = path.absolute().parent
    if not parent.is_dir():
        if parent.exists():
            return f"--{name} writes into a folder, got {file}, where {path.parent} is a file. Name another."
        return f"--{name} writes into a folder that exists, got {file}. Create {path.parent} first."
    if not os.access(path if path.exists() else parent, os.W_OK):
        return (
            f"--{name} needs a file that may be written, got {file}. Name another, or change its permissions."
        )
    if path.is_file() and path.stat().st_size and not overwrite:
        return (
            f"--{name} writes a new file, got {file}, which exists already. Name another, or add --overwrite to "
            "replace it."
        )
    return None
