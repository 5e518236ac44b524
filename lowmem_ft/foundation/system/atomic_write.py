"""Atomic writes: files and folders are complete or absent, whenever the process, the machine or the disk fails.

Each is written under a name that ends in ``.incomplete``, and renamed. A file system may keep the rename and lose the
contents when the machine fails. What a run saves is therefore flushed to disk first: it cannot be made again, and
earlier checkpoints are deleted once a new one is in place. A cache's entry is made again if it is damaged, and waits
for no disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

INCOMPLETE = ".incomplete"

Replace = Callable[[Path, Path], None]
"""A function that deletes a folder, if it exists, and may move files from it to the folder that takes its place."""


def incomplete_name(target: Path) -> Path:
    """Return the path to which :func:`whole_folder` and :func:`whole_file` write what a run saves."""
    return target.with_name(f"{target.name}{INCOMPLETE}")


@contextlib.contextmanager
def whole_file(target: Path, *, is_cache: bool = False) -> Iterator[IO[bytes]]:
    """Write or replace a file at the end of a block; a reader finds the old one or the new one.

    Args:
        target: the file, in a folder that exists.
        is_cache: whether it can be made again, and several processes may be writing it: each writes to a name of its
            own, readable by this user alone, and nothing is flushed to disk.

    Yields:
        The stream to write to.

    Raises:
        OSError: if it cannot be written; the old file stays.
    """
    partial = incomplete_name(target)
    if is_cache:
        descriptor, name = tempfile.mkstemp(INCOMPLETE, f".{target.name}.", target.parent)
        os.close(descriptor)
        partial = Path(name)
    try:
        with partial.open("wb") as stream:
            yield stream
            if not is_cache:
                stream.flush()
                os.fsync(stream.fileno())
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_whole_file(target: Path, text: str) -> None:
    """Write or replace a file that a run saves; see :func:`whole_file`."""
    with whole_file(target) as stream:
        stream.write(text.encode())


def begin_folder(target: Path, replace: Replace) -> Path:
    """Make the empty folder that will become ``target``; see :func:`whole_folder`."""
    partial = incomplete_name(target)
    replace(partial, target)  # left by a killed process
    partial.mkdir(parents=True)
    return partial


def abandon_folder(target: Path) -> None:
    """Remove everything written since :func:`begin_folder`."""
    shutil.rmtree(incomplete_name(target), ignore_errors=True)


@contextlib.contextmanager
def whole_folder(target: Path, replace: Replace) -> Iterator[Path]:
    """Yield a new folder to write into; at the end flush it and rename it to ``target``, after an error remove it.

    Args:
        target: the final path, which may exist.
        replace: deletes what it replaces.

    Yields:
        The empty folder, under another name.
    """
    try:
        yield begin_folder(target, replace)
        _complete_folder(target, replace)
    except BaseException:
        abandon_folder(target)
        raise


def _complete_folder(target: Path, replace: Replace) -> None:
    """Flush everything written since :func:`begin_folder` to disk, and rename the folder."""
    partial = incomplete_name(target)
    _give_usual_modes(partial)
    for path in (*partial.rglob("*"), partial):
        flush_to_disk(path)
    _put_in_place(partial, target, replace)
    flush_to_disk(target.parent)


def _give_usual_modes(folder: Path) -> None:
    """Apply the umask to the files of a new folder: safetensors 0.8 makes them readable only by the user.

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


def _put_in_place(partial: Path, target: Path, replace: Replace) -> None:
    """Rename a folder, and delete its predecessor once the new one is in place."""
    old = target.with_name(f"{target.name}.old")
    if target.exists():
        replace(old, target)  # left by a process killed between the lines below
        target.rename(old)
    partial.rename(target)
    replace(old, target)


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder; a rename is journalled there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
