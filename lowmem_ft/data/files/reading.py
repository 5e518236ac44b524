"""Rows from a hub dataset, local files, a folder or a glob, memory-mapped or streamed.

``datasets`` does the reading itself. This module decides which of its readers to call, and turns failures into errors
that name the file, the line and the way out.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import datasets
import datasets.config
import pyarrow
from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError, DatasetsError

from lowmem_ft.data.config import SampleBy
from lowmem_ft.data.files.cache_errors import full_cache
from lowmem_ft.data.files.files import (
    count_of_suffixes,
    csv_header,
    is_hub_name,
    is_saved_dataset,
    known_files,
    local_files,
    malformed_json,
    reader_of,
    wrong_beginning,
)
from lowmem_ft.data.files.hub_datasets import not_to_be_had
from lowmem_ft.foundation.errors import DataError
from lowmem_ft.foundation.hub_connection import hub_is_reachable
from lowmem_ft.foundation.user_paths import expand_user, shown_path

logger = logging.getLogger(__name__)

Rows: TypeAlias = "datasets.Dataset | datasets.IterableDataset"

READING_ERRORS = (
    DatasetsError,
    pyarrow.ArrowInvalid,
    ValueError,
    RuntimeError,
    OSError,
    EOFError,
    zlib.error,
    zipfile.BadZipFile,
    StopIteration,
)
"""Errors that ``datasets`` raises for bad files and for a hub that cannot be reached, including HTTP errors.

Truncated compressed files raise further kinds; a file without any row ends its reader's first ``next``.
"""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One split of one dataset.

    Args:
        path: hub name, local file, folder, or glob.
        split: name of the split, or a slice such as ``train[:10%]``.
        setting: the recipe key that holds ``path``, for messages.
        split_setting: the recipe key that holds ``split``.
        name: configuration of a hub dataset.
        revision: hub branch, tag or commit.
        data_files: files inside the hub repository or folder.
        streaming: read while iterating instead of memory-mapping an Arrow copy.
        sample_by: the unit of a text file that becomes one row.
    """

    path: str
    split: str = "train"
    setting: str = "data.path"
    split_setting: str = "data.split"
    name: str | None = None
    revision: str | None = None
    data_files: list[str] | None = None
    streaming: bool = False
    sample_by: SampleBy = "line"

    def __str__(self) -> str:
        return f"{shown_path(self.path)} ({self.split})"

    def is_text(self) -> bool:
        """True if its rows are parts of text files, of which blank lines separate some."""
        folder = expand_user(self.path)
        files = known_files(folder) if folder.is_dir() and not is_saved_dataset(folder) else [self.path]
        return {reader_of(file) for file in files} == {"text"}

    def is_split_into_lines(self) -> bool:
        """True if each row is a line of a text file."""
        return self.sample_by == "line" and self.is_text()


def open_rows(source: Source) -> Rows:
    """Open the raw rows of a source.

    A folder may hold data files (``train.jsonl`` and ``test.jsonl`` become splits) or a dataset written by
    ``Dataset.save_to_disk``.

    Args:
        source: the source to open.

    Returns:
        A memory-mapped ``Dataset``, or an ``IterableDataset`` when streaming.

    Raises:
        DataError: if nothing is there, the hub cannot be reached, a file is empty or malformed, or the split is
            unknown.
    """
    try:
        with _offline_where_the_hub_is_out_of_reach(source):
            rows = _open(source)
    except READING_ERRORS as error:
        raise reading_error(error, source) from error
    if not source.streaming and len(rows) == 0:
        raise no_example(source)
    return rows


def _open(source: Source) -> Any:
    files = local_files(source.path, setting=source.setting)
    folder = expand_user(source.path)
    if is_saved_dataset(folder):
        return _open_saved(folder, source)
    request: dict[str, Any] = {"split": source.split, "streaming": source.streaming}
    if files is not None:
        _refuse_settings_of_the_hub(source)
        builder, options = _reader_options(files, source)
        # datasets treats a file name as a glob too, so a [ in it has to be escaped.
        request |= {"path": builder, "data_files": [glob.escape(file) for file in files], **options}
    else:
        request |= {
            "path": str(folder) if folder.is_dir() else source.path,
            "name": source.name,
            "revision": source.revision,
            "data_files": source.data_files,
            **_folder_options(folder, source),
        }
    return datasets.load_dataset(**request)


def _refuse_settings_of_the_hub(source: Source) -> None:
    """Reject settings of the hub for a local file, which has no configurations, revisions or other files in it."""
    for key in ("name", "revision", "data_files"):
        value = getattr(source, key)
        if value is not None:
            raise DataError(
                f"data.{key}={value} applies to a hub dataset{' or a folder' if key == 'data_files' else ''}, but "
                f"{source.setting} is a local file: {source.path}. Set data.{key}=null."
            )


@contextlib.contextmanager
def _offline_where_the_hub_is_out_of_reach(source: Source) -> Iterator[None]:
    """Make ``datasets`` use its cache at once without a hub, instead of after half a minute of retries."""
    is_offline = datasets.config.HF_HUB_OFFLINE
    if is_hub_name(source.path) and not hub_is_reachable():
        datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = is_offline


def _reader_options(files: list[str], source: Source) -> tuple[str, dict[str, Any]]:
    """Return the builder of ``datasets`` for files of one kind, and its options."""
    reader = reader_of(files[0])
    if reader != "text" and source.sample_by != "line":
        raise DataError(
            f"data.sample_by={source.sample_by} applies to .txt files, got {files[0]}. Set data.sample_by=line."
        )
    if reader == "text":
        return "text", {"encoding": "utf-8-sig", "sample_by": source.sample_by}
    if reader in ("csv", "tsv"):
        separator = "," if reader == "csv" else "\t"
        return "csv", {"sep": separator, **_cells_as_text(files, separator, source.setting)}
    assert reader is not None
    return reader, {}


def _folder_options(folder: Path, source: Source) -> dict[str, Any]:
    """Return options for a local folder; ``datasets`` itself finds the kind of its files, and accepts one kind only."""
    if not folder.is_dir():
        if source.sample_by != "line":
            raise DataError(
                f"data.sample_by={source.sample_by} applies to local .txt files, got {source.path}. Set "
                "data.sample_by=line."
            )
        return {}
    files = [str(file) for file in known_files(folder)]
    if len({reader_of(file) for file in files}) == 1:
        return _reader_options(files, source)[1]
    if source.data_files is None:
        logger.warning(
            "The folder %s holds files of several types (%s), and datasets reads only one. To choose, name files as "
            "in %s=%s/*.jsonl.",
            *(folder, count_of_suffixes(files), source.setting, folder),
        )
    return {}


def reading_error(error: Exception, source: Source) -> DataError:
    """Return the error to show instead of one that ``datasets`` raised on opening or reading a source.

    Args:
        error: the error raised.
        source: the source being read.

    Returns:
        A ``DataError`` that names the malformed line, the known splits, or what to do without a hub.
    """
    if (problem := full_cache(_root(error))) is not None:
        return problem
    reason, path, setting = _root_reason(error), source.path, source.setting
    if any(sign in reason for sign in _OF_NO_ROWS) or isinstance(error, StopIteration):
        return no_example(source)
    if isinstance(error, ValueError) and _SPLIT_ERROR.search(reason):
        seen = reason.removeprefix("ValueError: ")
        if "instruction format" in seen:
            return DataError(
                f"{source.split_setting} is a split's name, with or without a range such as train[:100] or "
                f"train[10%:20%], got {source.split}. Correct it."
            )
        return DataError(f"{source.split_setting}={source.split} is not in {path}: {seen} Name one of these.")
    local = expand_user(path)
    files = local_files(path, setting=setting) or (
        [str(f) for f in known_files(local)] if local.is_dir() else []
    )
    for file in files:
        if wrong := wrong_beginning(file):
            return DataError(f"{setting}: {file} {wrong}")
        problem = malformed_json(file) if reader_of(file) == "json" else None
        if problem:
            return DataError(f"{setting}: {problem}")
    if files:
        advice = _ADVICE.get(type(_root(error)).__name__, "Fix the file, or name another one.")
        return DataError(f"{setting}: {path} cannot be read: {reason.rstrip('.')}. {advice}")
    if isinstance(error, (ValueError, DataFilesNotFoundError)) and not isinstance(
        error, DatasetNotFoundError
    ):
        return DataError(
            f"{setting}: {path} cannot be opened: {reason} Check data.name, data.split and data.data_files."
        )
    return not_to_be_had(path, setting, reason)


def _cells_as_text(files: list[str], separator: str, setting: str) -> dict[str, Any]:
    """Return options that keep every cell as written: pandas would make ``007`` a number and ``None`` missing."""
    header = csv_header(files[0], separator, setting)
    columns = [name or f"Unnamed: {index}" for index, name in enumerate(header)]  # named as pandas does
    return {
        "features": datasets.Features(dict.fromkeys(columns, datasets.Value("string"))),
        "keep_default_na": False,
    }


def _open_saved(folder: Path, source: Source) -> Rows:
    try:
        saved = datasets.load_from_disk(str(folder))
    except IndexError as error:  # datasets cannot read back what it saved of no rows
        raise no_example(source) from error
    splits = saved if isinstance(saved, datasets.DatasetDict) else {str(saved.split or "train"): saved}
    if source.split not in splits:
        raise DataError(
            f"{source.split_setting}={source.split} is not in {folder}. Splits seen: {', '.join(map(str, splits))}. A "
            "folder written by save_to_disk has no slices; data.max_samples limits the number of examples."
        )
    rows = splits[source.split]
    if rows.format["type"] is not None:  # as it was saved: tensors, perhaps of some columns alone
        rows = rows.with_format(None)
    return rows.to_iterable_dataset() if source.streaming else rows


_ADVICE = {
    "UnicodeDecodeError": "Save it as UTF-8.",
    "ParserError": "Put a cell that holds a separator, a quote or a line break into double quotes.",
}
"""Advice for repairing the file, by the error that the reader raised."""

_OF_NO_ROWS = ("corresponds to no data", "BatchSize must be greater than 0")
"""Messages of the readers for files without a row; the second is Parquet's."""

_SPLIT_ERROR = re.compile(r"(unknown|bad) split\b|split name|instruction format", re.IGNORECASE)


def no_example(source: Source) -> DataError:
    """Return the error for a source without rows."""
    return DataError(f"{source.setting} holds no example: {source}. Name data with at least one row.")


def _root(error: BaseException) -> BaseException:
    """Return the innermost error: ``datasets`` wraps it in another that only says that loading failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _root_reason(error: BaseException) -> str:
    root = _root(error)
    return " ".join(f"{type(root).__name__}: {root}".split())[:400]
