"""Redirected files of a script that is only estimated: it writes to a temporary folder, and deletes or moves nothing.

A path that was written is read from there again. Caches of the libraries are written as usual; so are files that C code
or another process writes by itself, apart from Parquet's, in which TRL's trainers keep completions.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import pathlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lowmem_ft.foundation.upstream.import_hooks import wrap_when_imported
from lowmem_ft.foundation.upstream.patches import replace, wrap
from lowmem_ft.planning.script_runs.saved_shapes import save_shapes

_WRITES = frozenset("wax+")
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = "truncate chmod utime"
_DELETIONS = "remove unlink rmdir removedirs"
_MOVES = "rename replace renames link"
_CACHES = "HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE HF_MODULES_CACHE TORCH_HOME TRITON_CACHE_DIR"
_TOKENIZERS = "transformers.tokenization_utils_base"


def _do_nothing(function: object, *args: Any, **kwargs: Any) -> None:
    """Leave no trace."""


def _save_here(save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return save(*args, **{**kwargs, "push_to_hub": False})


def _make_no_repository(create: object, *args: Any, **kwargs: Any) -> Any:
    name = kwargs.get("repo_id") or next((arg for arg in args if isinstance(arg, str)), "")
    return SimpleNamespace(repo_id=name)


_SAVERS = (
    ("transformers.utils.hub", "PushToHubMixin", "push_to_hub", _do_nothing),
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained", _save_here),
    ("transformers.trainer", "Trainer", "create_model_card", _do_nothing),
    ("accelerate.accelerator", "Accelerator", "init_trackers", _do_nothing),
    ("datasets.arrow_dataset", "Dataset", "save_to_disk push_to_hub", _do_nothing),
    ("datasets.dataset_dict", "DatasetDict", "save_to_disk push_to_hub", _do_nothing),
    ("huggingface_hub.hf_api", "HfApi", "create_commit upload_file upload_folder", _do_nothing),
    ("huggingface_hub.hf_api", "HfApi", "create_repo", _make_no_repository),
    ("huggingface_hub.hf_api", "", "create_repo", _make_no_repository),
)
"""Module, class and methods that would write by themselves, or to the hub or a tracker, and what they do here."""


class FilesKeptAway:
    """Redirects writes to a folder that is deleted in the end."""

    def __init__(self) -> None:
        self.folder = Path()
        self._written = Path()
        self._real: tuple[str, ...] = ()
        self._deleted: set[str] = set()
        self._is_redirecting = True
        self._looking = threading.local()

    def redirect(self, undo: contextlib.ExitStack) -> None:
        """Redirect all writes until a stack is undone."""
        self.folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="lowmem_ft_script_")))
        self._written = self.folder / "written"
        self._written.mkdir()
        self._real = tuple(f"{os.path.realpath(path)}{os.sep}" for path in (self.folder, *_caches()))
        replace(undo, tempfile, "tempdir", str(self.folder))
        replace(undo, sys, "dont_write_bytecode", True)
        for owner, names, around in (
            (builtins, "open", self._open),
            (io, "open", self._open),
            (os, "open", self._open_descriptor),
            (os, "mkdir", self._mkdir),
            (os, _CHANGES, self._change),
            (os, _DELETIONS, self._delete),
            (os, _MOVES, self._move),
            (os, "symlink", self._symlink),
            (shutil, "rmtree", self._delete),
            (shutil, "copystat", self._move),
            (os, "stat lstat readlink", self._look),
            (os, "listdir", self._list_names),
            (os, "scandir", self._scan),
            *self._of_pathlib(),
        ):
            for name in names.split():
                wrap(undo, owner, name, around)
        save_shapes(undo)
        for module, owner, names, around in (
            *_SAVERS,
            ("bz2", "", "_builtin_open", self._open),  # which these took from builtins as they were imported
            ("tarfile", "", "bltn_open", self._open),
            (_TOKENIZERS, "PreTrainedTokenizerBase", "save_pretrained", self._save_tokenizer),
            (_TOKENIZERS, "PreTrainedTokenizerBase", "from_pretrained", self._load_tokenizer),
            ("pandas", "DataFrame", "to_parquet", self._write_table),
            ("pandas", "", "read_parquet", self._read_table),
            ("pyarrow.parquet", "ParquetWriter", "__init__", self._write_table),
            ("pyarrow.parquet", "", "read_table", self._read_table),
            ("accelerate.accelerator", "Accelerator", "save_state", _save_state),
            ("accelerate.accelerator", "Accelerator", "load_state", self._load_state),
        ):
            for name in names.split():
                wrap_when_imported(undo, module, owner, name, around)

    def _of_pathlib(self) -> Iterator[tuple[object, str, Callable[..., Any]]]:
        """Yield the functions that Python 3.10's pathlib took from os and io as it was imported."""
        if sys.version_info < (3, 11):
            for names, around in (
                ("open", self._open),
                ("mkdir", self._mkdir),
                ("chmod", self._change),
                ("unlink rmdir", self._delete),
                ("rename replace link", self._move),
                ("symlink", self._symlink),
                ("stat", self._look),
                ("listdir", self._list_names),
                ("scandir", self._scan),
            ):
                accessor = pathlib._normal_accessor  # pyright: ignore[reportAttributeAccessIssue]
                yield accessor, names, around

    @contextlib.contextmanager
    def as_ever(self) -> Iterator[None]:
        """Redirect nothing in a block, which is our code and not the script's."""
        with contextlib.ExitStack() as undo:
            replace(undo, self, "_is_redirecting", False)
            replace(undo, tempfile, "tempdir", None)
            yield

    def place_of(self, path: Any, *, is_written: bool) -> Any:
        """Return the real place of a path: the temporary folder if the script writes it there, or wrote it."""
        if not self._is_redirecting or not isinstance(path, (str, bytes, os.PathLike)):
            return path  # the number of an open file
        real = os.path.realpath(os.fsdecode(path))
        if f"{real}{os.sep}".startswith(self._real):
            return path
        there = str(self._written) + real
        if not is_written:
            return there if os.path.exists(there) or self._is_deleted(real) else path
        os.makedirs(os.path.dirname(there), exist_ok=True)
        if not os.path.exists(there) and os.path.isfile(real):
            shutil.copyfile(real, there)  # for a file that the script appends to
        return there

    def _is_looking(self) -> bool:
        return getattr(self._looking, "now", False)

    @contextlib.contextmanager
    def _directly(self) -> Iterator[None]:
        """Look at paths as they are in a block of this thread: libraries read files in several."""
        self._looking.now = True
        try:
            yield
        finally:
            self._looking.now = False

    def _look(self, look: Callable[..., Any], path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        """Look at a path; what is missing or deleted there is looked up where it was written."""
        if self._is_looking() or kwargs.get("dir_fd") is not None:
            return look(path, *args, **kwargs)
        if not self._deleted:
            with contextlib.suppress(FileNotFoundError):
                return look(path, *args, **kwargs)
        with self._directly():
            place = self.place_of(path, is_written=False)
        return look(place, *args, **kwargs)

    def _list_names(self, names: Callable[..., list[Any]], path: Any = None, *args: Any) -> list[Any]:
        """List the names in a folder, whether they were there before or written there."""
        parts = self._parts_of(path)
        return names(path, *args) if parts is None else [entry.name for entry in self._entries(*parts)]

    def _scan(self, scan: Callable[..., Any], path: Any = None, *args: Any) -> Any:
        parts = self._parts_of(path)
        return scan(path, *args) if parts is None else _Entries(self._entries(*parts))

    def _parts_of(self, path: Any) -> tuple[str, str, str] | None:
        """Return a folder as it was asked for, its place, and where it was written; None if it has one place alone."""
        asked = os.fspath(path or ".") if isinstance(path, (str, os.PathLike, type(None))) else None
        if self._is_looking() or not isinstance(asked, str) or self._is_real(asked):
            return None  # also for the number of an open folder
        with self._directly():
            real = os.path.realpath(asked)
            written = str(self._written) + real
            is_changed = bool(self._deleted) or os.path.isdir(written)
            is_there = os.path.isdir(written) or (os.path.isdir(real) and not self._is_deleted(real))
        if is_changed and not is_there:
            raise FileNotFoundError(2, os.strerror(2), asked)
        return (asked, real, written) if is_changed else None

    def _entries(self, asked: str, real: str, written: str) -> list[_Entry]:
        with self._directly():
            found: dict[str, os.DirEntry[str]] = {}
            for folder in (real, written):
                if os.path.isdir(folder):
                    found.update((entry.name, entry) for entry in os.scandir(folder))
            return [
                _Entry(asked, entry)
                for entry in found.values()
                if entry.path.startswith(written)
                or not (self._deleted and self._is_deleted(os.path.realpath(entry.path)))
            ]

    def _save_tokenizer(
        self, save: Callable[..., Any], tokenizer: Any, folder: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Redirect a tokenizer by its folder, as Rust code writes its files."""
        kwargs.pop("push_to_hub", None)
        return save(tokenizer, self.place_of(folder, is_written=True), *args, **kwargs)

    def _load_tokenizer(
        self, load: Callable[..., Any], kind: Any, name: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return load(kind, self._written_or_itself(name), *args, **kwargs)

    def _write_table(
        self, write: Callable[..., Any], table: Any, path: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        return write(table, self.place_of(path, is_written=True), *args, **kwargs)

    def _read_table(self, read: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        return read(self._written_or_itself(path), *args, **kwargs)

    def _load_state(
        self, load: Callable[..., Any], accelerator: Any, folder: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Load into the state that is there, so that it takes no memory."""
        name = folder or "checkpoints"
        if self._written_or_itself(name) == name:
            return load(accelerator, folder, *args, **kwargs)

    def _written_or_itself(self, path: Any) -> Any:
        """Return the redirected folder if the script wrote there, else the path itself, perhaps a name on the hub."""
        return self.place_of(path, is_written=False) if isinstance(path, (str, os.PathLike)) else path

    def _open(
        self, open_file: Callable[..., Any], file: Any, mode: str = "r", *args: Any, **kwargs: Any
    ) -> Any:
        is_written = not _WRITES.isdisjoint(mode)
        return open_file(self.place_of(file, is_written=is_written), mode, *args, **kwargs)

    def _open_descriptor(
        self, open_file: Callable[..., int], path: Any, flags: int, *args: Any, dir_fd: int | None = None
    ) -> int:
        if dir_fd is not None or flags & os.O_DIRECTORY:
            return open_file(path, flags, *args, dir_fd=dir_fd)
        is_written = bool(flags & _WRITE_FLAGS)
        return open_file(self.place_of(path, is_written=is_written), flags, *args)

    def _mkdir(self, mkdir: Callable[..., None], path: Any, *args: Any, **kwargs: Any) -> None:
        if self._is_real(path):
            mkdir(path, *args, **kwargs)
        elif os.path.exists(path):
            raise FileExistsError(17, os.strerror(17), os.fspath(path))
        else:
            os.makedirs(str(self._written) + os.path.realpath(os.fsdecode(path)), exist_ok=True)

    def _delete(self, delete: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        """Delete what the script has written; anything else stays, and is not there for the script."""
        is_there = os.path.lexists(path)
        self._change(delete, path, *args, **kwargs)
        if is_there and kwargs.get("dir_fd") is None and not self._is_real(path):
            self._deleted.add(os.path.realpath(os.fsdecode(path)))

    def _is_deleted(self, real: str) -> bool:
        """Return whether the script deleted a path, or a folder that it was in."""
        return any(f"{real}{os.sep}".startswith(f"{deleted}{os.sep}") for deleted in self._deleted)

    def _change(self, change: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        """Change only what the script has written; what is missing is missed."""
        if kwargs.get("dir_fd") is not None:
            return change(path, *args, **kwargs)
        place = self.place_of(path, is_written=False)
        if self._is_real(place) or not os.path.lexists(path):
            return change(place, *args, **kwargs)
        return None

    def _move(self, move: Callable[..., Any], source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Move or link only what the script has written, to where it would be written."""
        place = self.place_of(source, is_written=False)
        if self._is_real(place) or not os.path.lexists(source):
            return move(place, self.place_of(target, is_written=True), *args, **kwargs)
        return None

    def _symlink(self, link: Callable[..., Any], target: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        return link(target, self.place_of(name, is_written=True), *args, **kwargs)

    def _is_real(self, path: Any) -> bool:
        return (
            not self._is_redirecting
            or isinstance(path, int)
            or f"{os.path.realpath(os.fsdecode(path))}{os.sep}".startswith(self._real)
        )


class _Entry:
    """An entry of a folder, by the path that the script knows."""

    def __init__(self, folder: str, entry: os.DirEntry[str]) -> None:
        self._entry = entry
        self.path = os.path.join(folder, entry.name)

    def __fspath__(self) -> str:
        return self.path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)


class _Entries(list[_Entry]):
    """Entries as ``os.scandir`` returns them: an iterator, which may be closed or used as a block."""

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __next__(self) -> _Entry:
        if not self:
            raise StopIteration
        return self.pop(0)

    def close(self) -> None:
        """Forget the entries that are left."""
        self.clear()


def _caches() -> Iterator[str]:
    """Yield the folders where libraries keep what they have fetched or compiled."""
    home, triton = os.path.expanduser("~/.cache"), os.path.expanduser("~/.triton")
    yield from (os.environ.get("XDG_CACHE_HOME", home), home, triton, "/dev", "/proc")
    yield from filter(None, map(os.environ.get, _CACHES.split()))


def _save_state(save: object, accelerator: Any, folder: Any = None, *args: Any, **kwargs: Any) -> str:
    """Save nothing, which takes no memory."""
    os.makedirs(folder or "checkpoints", exist_ok=True)
    return str(folder or "checkpoints")
