"""Files that were dropped on the page: kept in one folder, under names made from their content."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.system.atomic_write import whole_file

MOST_CONFIG_BYTES, MOST_TOKENIZER_BYTES, MOST_DATA_BYTES = 1 << 18, 1 << 26, 1 << 26
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")

MOST_FILES = 64
"""The most files of each kind; those used longest ago go first."""

_KEPT_NAME = re.compile(r"(?:config|data|tokenizer)-[0-9a-f]{16}")


def is_kept_name(name: str) -> bool:
    """Return whether a name has the form of a kept file's name, which no path has."""
    return _KEPT_NAME.fullmatch(name) is not None


class KeptFiles:
    """The folder of dropped files; nothing is read outside it.

    Args:
        folder: the folder, which is made where it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def of_user(cls) -> KeptFiles:
        """Return the folder of the user who runs this process: ``lowmem_ft/ui`` in the cache folder."""
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return cls(Path(caches, "lowmem_ft", "ui"))

    @property
    def folder(self) -> Path:
        """The folder itself."""
        return self._folder

    def keep_config(self, content: bytes) -> str:
        """Keep a model's ``config.json`` and return its name.

        Raises:
            UserError: if it is too large or is no JSON object; the sizes in it are checked before an estimate.
        """
        fields = _json_object(content, "config.json", MOST_CONFIG_BYTES)
        if "model_type" not in fields:
            raise UserError(
                "A config.json must give model_type, got a file without it. Drop the config.json of the model's "
                "repository."
            )
        fields.pop("auto_map", None)  # which names code of the model's author
        return self._keep("config", "config.json", json.dumps(fields).encode())

    def keep_tokenizer(self, content: bytes) -> str:
        """Keep a ``tokenizer.json`` and return its name.

        Raises:
            UserError: if it is too large or is no JSON object.
        """
        _json_object(content, "tokenizer.json", MOST_TOKENIZER_BYTES)
        return self._keep("tokenizer", "tokenizer.json", content)

    def keep_data(self, content: bytes, suffix: str) -> str:
        """Keep a data file and return its name.

        Args:
            content: the whole file.
            suffix: the suffix of its name.

        Raises:
            UserError: if it is too large, or its suffix is not in ``DATA_SUFFIXES``.
        """
        if suffix not in DATA_SUFFIXES:
            raise UserError(
                f"A data file must end in {', '.join(DATA_SUFFIXES)}, got {suffix or 'no suffix'!r}. Convert it, or "
                "use `lowmem-ft data`."
            )
        _check_size(content, "data file", MOST_DATA_BYTES)
        return self._keep("data", f"data{suffix}", content)

    def model(self, name: str) -> Path | None:
        """Return the folder of a kept ``config.json``, as ``model=`` takes it; None if nothing has that name."""
        return self._folder_of(name, "config")

    def tokenizer(self, name: str) -> Path | None:
        """Return the folder of a kept tokenizer; None if nothing has that name."""
        return self._folder_of(name, "tokenizer")

    def data(self, name: str) -> Path | None:
        """Return a kept data file; None if nothing has that name."""
        folder = self._folder_of(name, "data")
        return None if folder is None else next(folder.glob("data.*"), None)

    def _folder_of(self, name: str, kind: str) -> Path | None:
        if not is_kept_name(name) or not name.startswith(f"{kind}-"):
            return None
        folder = self._folder / name
        if not folder.is_dir() or folder.is_symlink():
            return None
        os.utime(folder)
        return folder

    def _keep(self, kind: str, file_name: str, content: bytes) -> str:
        name = f"{kind}-{hashlib.sha256(content).hexdigest()[:16]}"
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        with whole_file(folder / file_name, is_cache=True) as stream:
            stream.write(content)
        kept = sorted(self._folder.glob(f"{kind}-*"), key=lambda each: each.stat().st_mtime_ns, reverse=True)
        for old in kept[MOST_FILES:]:
            shutil.rmtree(old, ignore_errors=True)
        return name


def _json_object(content: bytes, what: str, most_bytes: int) -> dict[str, Any]:
    _check_size(content, what, most_bytes)
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"The {what} must be JSON, got {error}. Drop the file of the model's repository."
        ) from error
    if not isinstance(fields, dict):
        raise UserError(
            f"The {what} must be a JSON object, got {type(fields).__name__}. Drop the file of the model's repository."
        )
    return fields


def _check_size(content: bytes, what: str, most_bytes: int) -> None:
    if len(content) > most_bytes:
        raise UserError(
            f"A {what} on the page may have at most {most_bytes:,} bytes, got {len(content):,}. Use the command, which "
            "takes a path."
        )
