"""The sources that a recipe lists, each with a config of its own; nothing here needs ``datasets`` or torch."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lowmem_ft.data.config import DataConfig
from lowmem_ft.data.files.files import columns_of, is_saved_dataset, local_files
from lowmem_ft.data.source_keys import SHARES, in_source
from lowmem_ft.data.text.token_rows import IDS
from lowmem_ft.foundation.errors import DataError
from lowmem_ft.foundation.user_paths import expand_user


@dataclass(frozen=True, kw_only=True)
class ListedSource:
    """One source of the training data.

    Args:
        name: unique among the sources; metrics are named by it.
        config: the recipe's ``data``, with the source's own values.
        setting: the recipe key that names it.
        weight: its share of the examples drawn, in relation to the other weights; None: nothing is drawn.
        repeats: how often each of its examples occurs in an epoch.
        index: its place in ``data.sources``; None: ``data.path`` names it.
    """

    name: str
    config: DataConfig
    setting: str = "data.path"
    weight: float | None = None
    repeats: int = 1
    index: int | None = None

    @property
    def path(self) -> str:
        """Hub name, file, folder or glob."""
        assert self.config.path is not None
        return self.config.path

    @contextlib.contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Call the keys of ``data`` in errors what they are called in ``data.sources``."""
        try:
            yield
        except DataError as error:
            if self.index is None:
                raise
            raise DataError(*(in_source(problem, self.index) for problem in error.problems)) from error


def listed_sources(config: DataConfig) -> list[ListedSource]:
    """Return the sources of the training data: those of ``data.sources``, or of ``data.path``, split at its commas."""
    if config.sources is None:
        configs = [replace(config, path=path) for path in _paths(config.path)]
        names = _unique([_name(os.fspath(path)) for path in _paths(config.path)])
        return [ListedSource(name=name, config=own) for name, own in zip(names, configs, strict=True)]
    listed = []
    for index, name in enumerate(_unique([_name(str(source["path"])) for source in config.sources])):
        source = config.sources[index]
        own = {key: value for key, value in source.items() if key not in SHARES}
        listed.append(
            ListedSource(
                name=name,
                config=replace(config, sources=None, **own),
                setting=f"data.sources[{index}].path",
                weight=source.get("weight"),
                repeats=source.get("repeats") or 1,
                index=index,
            )
        )
    return listed


def may_be_tokens(config: DataConfig) -> bool:
    """Return whether the training data may be tokens already, which need no tokenizer; False where a path is wrong."""
    try:
        return any(map(_may_be_tokens, listed_sources(config)))
    except DataError:
        return False


def _may_be_tokens(listed: ListedSource) -> bool:
    if listed.config.format == "tokens" or is_saved_dataset(expand_user(listed.path)):
        return True
    files = local_files(listed.path) or []
    return any(IDS in (columns_of(file, listed.setting) or ()) for file in files[:1])


def _paths(path: str | None) -> list[str]:
    """Return the paths in a list with commas; a path that exists may have commas in its name."""
    if path is None:
        return []
    paths = [part.strip() for part in os.fspath(path).split(",")]
    return paths if len(paths) > 1 and all(paths) and not expand_user(path).exists() else [path]


def _name(path: str) -> str:
    """Return a short name for a source: its file without suffixes, its folder, or the hub name without its owner."""
    parts = [part for part in Path(path).parts if not any(sign in part for sign in "*?[")]
    return re.sub(r"[^\w-]+", "_", (parts[-1] if parts else "").partition(".")[0]).strip("_") or "data"


def _unique(names: list[str]) -> list[str]:
    """Return the names, the second of two equal ones as ``name_2``."""
    unique: list[str] = []
    for name in names:
        candidates = (name if number == 1 else f"{name}_{number}" for number in range(1, len(names) + 1))
        unique.append(next(candidate for candidate in candidates if candidate not in unique))
    return unique
