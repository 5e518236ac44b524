"""Paths as users write and read them, and hints for a path that names no file."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lowmem_ft.foundation.errors import did_you_mean
from lowmem_ft.foundation.packages import own_folder


def expand_user(path: str | os.PathLike[str]) -> Path:
    """Expand a leading ``~`` to a home folder, as a shell does: the ``~name`` of an unknown user stays as it is."""
    return Path(os.path.expanduser(path))


KEPT_FOLDER_VARIABLE = "LOWMEM_FT_TRACE_CACHE"
"""Variable for the folder where estimates keep things, or ``off``; unset: ``lowmem_ft/traces`` in the cache folder."""


def kept_folder() -> Path | None:
    """Return the folder of what estimates keep between runs; None: nothing is kept."""
    chosen = os.environ.get(KEPT_FOLDER_VARIABLE, "")
    if chosen:
        return None if chosen == "off" else Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches, "lowmem_ft", "traces") if os.path.isabs(caches) else None  # without a home, `~` stays


def address_problem(setting: str, path: str | os.PathLike[str]) -> str | None:
    """Return what is wrong with an address (``https://``, ``s3://``) given for a hub name or path; None for no address.

    Args:
        setting: the setting that holds it.
        path: as the user wrote it.
    """
    text = os.fspath(path)
    if _ADDRESS.match(text) is None:
        return None
    rule = f"{setting} is a hub name or a path on this machine, got the address {text}."
    if found := _ON_THE_HUB.match(text):
        return f"{rule} Write only the hub name: {found[1]}."
    return f"{rule} Download it, and name the file or folder."


_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_ON_THE_HUB = re.compile(
    r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)|hf:/)/(?:datasets/)?([\w.-]+/[\w.-]+)(?:$|/(?:tree/|$))"
)


def recipes_folder() -> Path:
    """Return the folder of the recipes that come with this package."""
    return _shipped("recipes")


def docs_folder() -> Path:
    """Return the folder of the pages that come with this package."""
    return _shipped("docs")


def _shipped(name: str) -> Path:
    """Return a folder that is inside the package in a wheel, and next to it in the source tree."""
    package = Path(own_folder("lowmem_ft")).resolve()
    inside_wheel, in_source_tree = package / name, package.parent / name
    return inside_wheel if inside_wheel.is_dir() else in_source_tree


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return a path for people: a file next to our recipes by the package's name, not by Python's library folder.

    Args:
        path: as a recipe has it; a path of the user's own stays as it is.
    """
    folder = recipes_folder()
    if Path(path).is_absolute() and Path(path).is_relative_to(folder):
        return str(Path("lowmem_ft", folder.name, Path(path).relative_to(folder)))
    return os.fspath(path)


def neighbours(missing: Path) -> str:
    """Return a suffix for the error about a path that names no file: what is there instead, or files spelt alike."""
    if missing.is_symlink():
        return f" It is a link to {os.readlink(missing)}, which does not exist."
    folder = missing.parent
    if missing.exists():
        is_special = not (missing.is_dir() or missing.is_file())
        return " It is a pipe or a device, not a regular file." if is_special else ""
    if not folder.is_dir():
        return ""
    return did_you_mean(missing.name, (entry.name for entry in folder.iterdir() if _is_alike(entry, missing)))


def _is_alike(entry: Path, missing: Path) -> bool:
    """Compare names without their suffix, as a shared one makes short names look alike."""
    return entry.suffix != missing.suffix or bool(did_you_mean(missing.stem, [entry.stem]))
