"""Atomic writes: files and folders are complete or absent, whenever the process, the machine or the disk fails."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from lowmem_ft.training.folder.own_files import replace_saved


def incomplete_name(target: Path) -> Path:
    """Return the path to which :func:`whole_folder` and :func:`write_whole_file` write until all is complete."""
    return target.with_name(f"{target.name}.incomplete")


def begin_folder(target: Path) -> Path:
    """Make the empty folder that will become ``target``; see :func:`whole_folder`."""
    partial = incomplete_name(target)
    replace_saved(partial, target)  # left by a killed process
    partial.mkdir(parents=True)
    return partial


def complete_folder(target: Path) -> None:
    """Flush everything written since :func:`begin_folder` to disk, and rename the folder."""
    partial = incomplete_name(target)
    _give_usual_modes(partial)
    for path in (*partial.rglob("*"), partial):
        _flush_to_disk(path)
    _put_in_place(partial, target)
    _flush_to_disk(target.parent)


def abandon_folder(target: Path) -> None:
    """Remove everything written since :func:`begin_folder`."""
    shutil.rmtree(incomplete_name(target), ignore_errors=True)


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder to write into; at the end flush it and rename it to ``target``, after an error remove it.

    Args:
        target: the final path. If it exists, the files that a run had saved there are replaced; a user's own files
            stay.

    Yields:
        The empty folder, under another name.
    """
    try:
        yield begin_folder(target)
        complete_folder(target)
    except BaseException:
        abandon_folder(target)
        raise


def _give_usual_modes(folder: Path) -> None:
    """Let those read the files of a new folder whom the umask lets read: safetensors 0.8 writes for the user alone.

    The folder, which this process has made, has the umask in its own mode; there is no other way to ask for it than to
    change it, in all threads.
    """
    if os.name == "nt":
        return  # Windows has no such modes
    usual = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode | usual != mode:
                with contextlib.suppress(OSError):  # of a disk that has no modes
                    path.chmod(mode | usual)


def _put_in_place(partial: Path, target: Path) -> None:
    """Rename a folder, and delete its predecessor once the new one is in place."""
    old = target.with_name(f"{target.name}.old")
    if target.exists():
        replace_saved(old, target)  # left by a process killed between the lines below
        target.rename(old)
    partial.rename(target)
    replace_saved(old, target)


def write_whole_file(target: Path, text: str) -> None:
    """Write or replace a file; a reader finds either the old text or the new one.

    Raises:
        OSError: if it cannot be written; the old file stays.
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
