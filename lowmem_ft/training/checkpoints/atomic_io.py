"""Files and folders that are whole or not there, whenever the process, the machine or the disk gives up."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from lowmem_ft.training.checkpoints.saved_files import replace_saved


def incomplete_name(target: Path) -> Path:
    """Where :func:`whole_folder` and :func:`write_whole_file` write until all is there."""
    return target.with_name(f"{target.name}.incomplete")


def begin_folder(target: Path) -> Path:
    """Make the empty folder that is to become ``target``; see :func:`whole_folder`."""
    partial = incomplete_name(target)
    replace_saved(partial, target)  # what a killed process left
    partial.mkdir(parents=True)
    return partial


def complete_folder(target: Path) -> None:
    """Flush what was written since :func:`begin_folder` to disk, and rename it."""
    partial = incomplete_name(target)
    for path in (*partial.rglob("*"), partial):
        _flush_to_disk(path)
    _put_in_place(partial, target)
    _flush_to_disk(target.parent)


def abandon_folder(target: Path) -> None:
    """Remove what was written since :func:`begin_folder`."""
    shutil.rmtree(incomplete_name(target), ignore_errors=True)


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A new folder to write into; flushed to disk and renamed to ``target`` at the end, removed if anything is raised.

    Args:
        target: what it will be called. In a folder of that name, what a run had saved is replaced; somebody's own
            files stay.

    Yields:
        The empty folder, under another name.
    """
    try:
        yield begin_folder(target)
        complete_folder(target)
    except BaseException:
        abandon_folder(target)
        raise


def _put_in_place(partial: Path, target: Path) -> None:
    """Rename; what was there is deleted once its successor stands."""
    old = target.with_name(f"{target.name}.old")
    if target.exists():
        replace_saved(old, target)  # of a process that was killed between the lines below
        target.rename(old)
    partial.rename(target)
    replace_saved(old, target)


def write_whole_file(target: Path, text: str) -> None:
    """Write or replace a file; whoever reads it finds the old text or the new one.

    Raises:
        OSError: if it cannot be written; the old one stays.
    """
    partial = incomplete_name(target)
    try:
        partial.write_text(text, "utf-8")
        _flush_to_disk(partial)
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _flush_to_disk(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder; a rename is journalled there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
