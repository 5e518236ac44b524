"""Rows from where the user keeps them: a hub dataset, local files, a folder or a glob, memory-mapped or streamed.

Reading itself is left to ``datasets``. This module decides which of its readers to call, and turns what can go wrong
into errors that name the file, the line and the way out.
"""

from __future__ import annotations

import csv
import glob
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import datasets
import pyarrow
from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError, DatasetsError

from lowmem_ft.errors import DataError, did_you_mean

Rows: TypeAlias = "datasets.Dataset | datasets.IterableDataset"

READER_BY_SUFFIX = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}
READING_ERRORS = (DatasetsError, pyarrow.ArrowInvalid, ValueError, RuntimeError, OSError)
"""What ``datasets`` raises for bad files and for a hub that cannot be reached; the last two include HTTP errors."""


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
    """

    path: str
    split: str = "train"
    setting: str = "data.path"
    split_setting: str = "data.split"
    name: str | None = None
    revision: str | None = None
    data_files: list[str] | None = None
    streaming: bool = False

    def __str__(self) -> str:
        return f"{self.path} ({self.split})"


def open_rows(source: Source) -> Rows:
    """The raw rows of a source.

    A text file gives one row a line, as ``load_dataset("text")`` does. A folder may hold data files (``train.jsonl``
    and ``test.jsonl`` become splits) or what ``Dataset.save_to_disk`` wrote.

    Args:
        source: where to look.

    Returns:
        A memory-mapped ``Dataset``, or an ``IterableDataset`` when streaming.

    Raises:
        DataError: if nothing is there, the hub cannot be reached, a file is empty or malformed, or the split is
            unknown.
    """
    files = local_files(source.path, setting=source.setting)
    folder = Path(source.path).expanduser()
    if _is_saved(folder):
        return _open_saved(folder, source)
    request: dict[str, Any] = {"split": source.split, "streaming": source.streaming}
    if files is not None:
        request |= {"path": READER_BY_SUFFIX[Path(files[0]).suffix], "data_files": files}
        if request["path"] == "csv":
            request |= _csv_as_text(files[0])
    else:
        place = str(folder) if folder.is_dir() else source.path
        request |= {
            "path": place,
            "name": source.name,
            "revision": source.revision,
            "data_files": source.data_files,
        }
    try:
        rows: Any = datasets.load_dataset(**request)
    except READING_ERRORS as error:
        raise reading_error(error, source) from error
    if not source.streaming and len(rows) == 0:
        raise DataError(f"{source.setting} holds no example: {source}. Name data with at least one row.")
    return rows


def local_files(path: str, *, setting: str = "data.path") -> list[str] | None:
    """The local files that a path or a glob names, or None for a folder and for a hub name.

    Raises:
        DataError: if the path can only be a local one and is not there, a glob matches nothing, the files are of
            unknown or different kinds, or one is empty.
    """
    expanded = Path(path).expanduser()
    if expanded.is_dir():
        _require_known_files(expanded, setting)
        return None
    if expanded.is_file():
        files = [str(expanded)]
    elif any(sign in path for sign in "*?["):
        files = sorted(file for file in glob.glob(str(expanded), recursive=True) if Path(file).is_file())
        if not files:
            raise DataError(f"{setting} is a glob that matches no file: {path} (looked from {Path.cwd()}).")
    elif _can_only_be_local(path):
        raise DataError(f"{setting} names no file: {path} (looked from {Path.cwd()}).{_neighbours(expanded)}")
    else:
        return None
    _require_one_kind(files, setting)
    for file in files:
        if Path(file).stat().st_size == 0:
            raise DataError(f"{setting}: {file} is empty. Name files that hold at least one example.")
    return files


def reading_error(error: Exception, source: Source) -> DataError:
    """The error to show instead of one that ``datasets`` raised on opening or reading a source.

    Args:
        error: what was raised.
        source: what was being read.

    Returns:
        A ``DataError`` that names the malformed line, the known splits, or what to do without a hub.
    """
    reason, path, setting = _root_reason(error), source.path, source.setting
    if isinstance(error, ValueError) and re.search(r"\b(unknown|bad) split\b", reason, re.IGNORECASE):
        return DataError(f"{source.split_setting}={source.split} is not in {path}: {reason}")
    local = Path(path).expanduser()
    files = local_files(path, setting=setting) or (
        [str(f) for f in _known_files(local)] if local.is_dir() else []
    )
    for file in files:
        problem = malformed_json(file) if READER_BY_SUFFIX[Path(file).suffix] == "json" else None
        if problem:
            return DataError(f"{setting}: {problem}")
    if files:
        return DataError(f"{setting}: {path} cannot be read: {reason}")
    if isinstance(error, (ValueError, DataFilesNotFoundError)) and not isinstance(
        error, DatasetNotFoundError
    ):
        return DataError(
            f"{setting}: {path} cannot be opened: {reason} See data.name, data.split and data.data_files."
        )
    return DataError(
        f"{setting} names neither a local file or folder nor a hub dataset that can be reached: {path} ({reason}). "
        "Check the name; for a gated dataset accept its terms on the hub and run `hf auth login`; offline, run "
        f"`hf download {path} --repo-type dataset --local-dir DIR` on a machine that is online, copy DIR here and set "
        f"{setting}=DIR."
    )


def malformed_json(file: str) -> str | None:
    """Which line of a JSON or JSON-lines file is malformed, and what stands there; None if all is well."""
    try:
        with open(file, encoding="utf-8-sig") as lines:
            for number, line in _whole_or_lines(file, lines):
                try:
                    value = json.loads(line)
                except json.JSONDecodeError as error:
                    number, column = number + error.lineno - 1, error.colno
                    seen = line.splitlines()[error.lineno - 1]
                    why = f"is not valid JSON ({error.msg}, column {column})"
                else:
                    if isinstance(value, (dict, list)):
                        continue
                    seen, why = line, "holds no JSON object"
                return f"{file}, line {number} {why}: {_shortened(seen)} Mend or remove that line."
    except UnicodeDecodeError as error:
        return f"{file} is not UTF-8 text ({error.reason} at byte {error.start}). Save it as UTF-8."
    return None


def _whole_or_lines(file: str, lines: Any) -> Iterator[tuple[int, str]]:
    """A JSON-lines file line by line with numbers from 1; one document (starting with ``[`` or a lone ``{``) whole."""
    first = lines.readline()
    one_document = first.lstrip().startswith("[") or first.strip() == "{"
    lines.seek(0)
    if one_document:
        yield 1, lines.read().rstrip()
        return
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, line.rstrip()


def _csv_as_text(file: str) -> dict[str, Any]:
    """Options that keep every cell as written: pandas would make numbers of ``007`` and nothing of ``None``."""
    with open(file, encoding="utf-8-sig", errors="replace", newline="") as lines:
        header = next(csv.reader(lines), [])
    columns = [name or f"Unnamed: {index}" for index, name in enumerate(header)]  # as pandas names them
    return {
        "features": datasets.Features(dict.fromkeys(columns, datasets.Value("string"))),
        "keep_default_na": False,
    }


def _is_saved(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _open_saved(folder: Path, source: Source) -> Rows:
    saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, datasets.DatasetDict):
        if source.split not in saved:
            seen = ", ".join(str(name) for name in saved)
            raise DataError(f"{source.split_setting}={source.split} is not in {folder}. Splits seen: {seen}.")
        saved = saved[source.split]
    return saved.to_iterable_dataset() if source.streaming else saved


def _require_known_files(folder: Path, setting: str) -> None:
    if not _is_saved(folder) and not _known_files(folder):
        raise DataError(f"{setting}: the folder {folder} holds no {_known_suffixes()} file.")


def _known_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix in READER_BY_SUFFIX and file.is_file())


def _require_one_kind(files: list[str], setting: str) -> None:
    kinds = Counter(Path(file).suffix for file in files)
    unknown = [suffix for suffix in kinds if suffix not in READER_BY_SUFFIX]
    if unknown:
        seen = ", ".join(suffix or "no suffix" for suffix in unknown)
        raise DataError(f"{setting} takes {_known_suffixes()} files, got {seen}: {files[0]}.")
    if len({READER_BY_SUFFIX[suffix] for suffix in kinds}) > 1:
        seen = ", ".join(f"{count} {suffix}" for suffix, count in sorted(kinds.items()))
        raise DataError(
            f"{setting} takes files of one kind, the glob matches {seen}. Narrow it, as in *.jsonl."
        )


def _known_suffixes() -> str:
    return "/".join(suffix.removeprefix(".") for suffix in READER_BY_SUFFIX)


def _can_only_be_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or Path(path).suffix in READER_BY_SUFFIX or path.count("/") > 1


def _neighbours(missing: Path) -> str:
    folder = missing.parent
    if not folder.is_dir():
        return f" The folder {folder} does not exist either."
    return did_you_mean(missing.name, (entry.name for entry in folder.iterdir()))


def _root_reason(error: BaseException) -> str:
    """The innermost message: ``datasets`` wraps the telling error in one that only says that loading failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def _shortened(text: str, limit: int = 120) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "...") + "."
