"""Redirected files of a script that is only estimated: it writes to a temporary folder, and deletes or moves nothing.

A path that was written is read from there again. Caches of the libraries are written as usual; so are files that C code
or another process writes by itself.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lowmem_ft.estimator.script.saved_shapes import save_shapes
from lowmem_ft.upstream.on_import import when_imported
from lowmem_ft.upstream.patches import replace

_WRITES = frozenset("wax+")
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = (
    "remove",
    "unlink",
    "rmdir",
    "rename",
    "replace",
    "removedirs",
    "renames",
    "truncate",
    "symlink",
    "link",
)

_SAVERS = (
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase", ("push_to_hub",)),
    ("transformers.modeling_utils", "PreTrainedModel", ("push_to_hub",)),
    ("transformers.trainer", "Trainer", ("save_model", "push_to_hub", "create_model_card")),
    ("accelerate.accelerator", "Accelerator", ("save_model", "init_trackers")),
    ("datasets.arrow_dataset", "Dataset", ("save_to_disk", "push_to_hub")),
    ("datasets.dataset_dict", "DatasetDict", ("save_to_disk", "push_to_hub")),
    ("huggingface_hub.hf_api", "HfApi", ("create_commit", "upload_file", "upload_folder")),
)
"""Module, class and methods that would write by themselves, or to the hub or a tracker; here they do nothing."""


class FilesKeptAway:
    """Redirects writes to a folder that is deleted in the end."""

    def __init__(self) -> None:
        self.folder = Path()
        self._written = Path()
        self._real: tuple[str, ...] = ()
        self._is_redirecting = True
        self._is_looking = False

    @contextlib.contextmanager
    def redirecting(self) -> Iterator[None]:
        """Redirect all writes in a block."""
        with contextlib.ExitStack() as undo:
            self.folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="lowmem_ft_script_")))
            self._written = self.folder / "written"
            self._written.mkdir()
            self._real = tuple(f"{os.path.realpath(path)}{os.sep}" for path in (self.folder, *_caches()))
            replace(undo, tempfile, "tempdir", str(self.folder))
            replace(undo, sys, "dont_write_bytecode", True)
            open_file, open_descriptor, mkdir = builtins.open, os.open, os.mkdir
            for module in (builtins, io):
                replace(undo, module, "open", self._opened(open_file))
            replace(undo, os, "open", self._opened_descriptor(open_descriptor))
            replace(undo, os, "mkdir", self._made(mkdir))
            for name in _CHANGES:
                replace(undo, os, name, self._changed(getattr(os, name)))
            replace(undo, shutil, "rmtree", self._changed(shutil.rmtree))
            for name in ("stat", "lstat", "listdir", "scandir"):
                replace(undo, os, name, self._looked_at(getattr(os, name)))
            save_shapes(undo)
            when_imported(undo, "transformers.modeling_utils", functools.partial(self._save_configs, undo))
            tokenizers = functools.partial(self._save_tokenizers, undo)
            when_imported(undo, "transformers.tokenization_utils_base", tokenizers)
            when_imported(undo, "accelerate.accelerator", functools.partial(self._save_states, undo))
            for module_name, class_name, methods in _SAVERS:
                when_imported(undo, module_name, functools.partial(_save_nothing, undo, class_name, methods))
            when_imported(undo, "huggingface_hub.hf_api", functools.partial(_make_no_repositories, undo))
            yield

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
            return there if os.path.exists(there) else path
        os.makedirs(os.path.dirname(there), exist_ok=True)
        if not os.path.exists(there) and os.path.isfile(real):
            shutil.copyfile(real, there)  # for a file that the script appends to
        return there

    def _looked_at(self, look: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that looks at a path: what is missing there is looked up where it was written."""

        @functools.wraps(look)
        def look_elsewhere(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            try:
                return look(path, *args, **kwargs)
            except FileNotFoundError:
                if self._is_looking or kwargs.get("dir_fd") is not None:
                    raise
                with contextlib.ExitStack() as undo:
                    replace(undo, self, "_is_looking", True)  # finding the place looks at paths too
                    place = self.place_of(path, is_written=False)
                return look(place, *args, **kwargs)

        return look_elsewhere

    def _save_configs(self, undo: contextlib.ExitStack, modeling_utils: Any) -> None:
        """Save a model's config alone, which is all that ``from_pretrained`` needs here to make it again."""

        def save_pretrained(model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
            model.config.save_pretrained(self.place_of(save_directory, is_written=True))

        replace(undo, modeling_utils.PreTrainedModel, "save_pretrained", save_pretrained)

    def _save_tokenizers(self, undo: contextlib.ExitStack, module: Any) -> None:
        """Redirect tokenizers by their folder, as Rust code writes their files."""
        tokenizer = module.PreTrainedTokenizerBase
        save, load = tokenizer.save_pretrained, tokenizer.from_pretrained.__func__

        @functools.wraps(save)
        def save_pretrained(self_: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop("push_to_hub", None)
            return save(self_, self.place_of(save_directory, is_written=True), *args, **kwargs)

        @functools.wraps(load)
        def from_pretrained(kind: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
            return load(kind, self._written_or_itself(name), *args, **kwargs)

        replace(undo, tokenizer, "save_pretrained", save_pretrained)
        replace(undo, tokenizer, "from_pretrained", classmethod(from_pretrained))

    def _save_states(self, undo: contextlib.ExitStack, module: Any) -> None:
        """Save nothing, and load into the state that is there, so that neither takes memory."""
        accelerator = module.Accelerator
        load = accelerator.load_state

        def save_state(self_: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> str:
            os.makedirs(output_dir or "checkpoints", exist_ok=True)
            return str(output_dir or "checkpoints")

        @functools.wraps(load)
        def load_state(self_: Any, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
            name = input_dir or "checkpoints"
            if self._written_or_itself(name) == name:
                return load(self_, input_dir, *args, **kwargs)

        replace(undo, accelerator, "save_state", save_state)
        replace(undo, accelerator, "load_state", load_state)

    def _written_or_itself(self, path: Any) -> Any:
        """Return the redirected folder if the script wrote there, else the path itself, perhaps a name on the hub."""
        return self.place_of(path, is_written=False) if isinstance(path, (str, os.PathLike)) else path

    def _opened(self, open_file: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(open_file)
        def open_elsewhere(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            is_written = not _WRITES.isdisjoint(mode)
            return open_file(self.place_of(file, is_written=is_written), mode, *args, **kwargs)

        return open_elsewhere

    def _opened_descriptor(self, open_descriptor: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(open_descriptor)
        def open_elsewhere(path: Any, flags: int, *args: Any, dir_fd: int | None = None) -> int:
            if dir_fd is not None or flags & os.O_DIRECTORY:
                return open_descriptor(path, flags, *args, dir_fd=dir_fd)
            is_written = bool(flags & _WRITE_FLAGS)
            return open_descriptor(self.place_of(path, is_written=is_written), flags, *args)

        return open_elsewhere

    def _made(self, mkdir: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(mkdir)
        def make_elsewhere(path: Any, *args: Any, **kwargs: Any) -> None:
            if self._is_real(path):
                mkdir(path, *args, **kwargs)
            elif os.path.exists(path):
                raise FileExistsError(17, os.strerror(17), os.fspath(path))
            else:
                os.makedirs(str(self._written) + os.path.realpath(os.fsdecode(path)), exist_ok=True)

        return make_elsewhere

    def _changed(self, change: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that deletes, moves or links, so that it changes only files in the temporary folder."""

        @functools.wraps(change)
        def change_none(path: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is not None or self._is_real(path):
                return change(path, *args, **kwargs)
            return None

        return change_none

    def _is_real(self, path: Any) -> bool:
        return (
            not self._is_redirecting
            or isinstance(path, int)
            or f"{os.path.realpath(os.fsdecode(path))}{os.sep}".startswith(self._real)
        )


def _caches() -> Iterator[str]:
    """Yield the folders where libraries keep what they have fetched or compiled."""
    home = os.path.expanduser("~/.cache")
    yield from (
        os.environ.get("XDG_CACHE_HOME", home),
        home,
        os.path.expanduser("~/.triton"),
        "/dev",
        "/proc",
    )
    for name in (
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_DATASETS_CACHE",
        "HF_MODULES_CACHE",
        "TORCH_HOME",
        "TRITON_CACHE_DIR",
    ):
        if os.environ.get(name):
            yield os.environ[name]


def _save_nothing(
    undo: contextlib.ExitStack, class_name: str | None, methods: tuple[str, ...], module: Any
) -> None:
    owner = module if class_name is None else getattr(module, class_name)
    for name in methods:
        replace(undo, owner, name, _nothing(getattr(owner, name)))


def _make_no_repositories(undo: contextlib.ExitStack, hf_api: Any) -> None:
    def make_none(*args: Any, **kwargs: Any) -> Any:
        name = kwargs.get("repo_id") or next((arg for arg in args if isinstance(arg, str)), "")
        return SimpleNamespace(repo_id=name)

    replace(undo, hf_api.HfApi, "create_repo", make_none)
    replace(undo, hf_api, "create_repo", make_none)


def _nothing(function: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(function)
    def do_nothing(*args: Any, **kwargs: Any) -> None:
        """Leave no trace."""

    return do_nothing
