"""Local data files: those that a path names, and checks that each begins as its kind does.

Nothing here needs ``datasets`` or torch, so that a wrong path is reported before either is imported.
"""

from __future__ import annotations

import csv
import errno
import glob
import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from lowmem_ft.foundation.errors import DataError
from lowmem_ft.foundation.user_paths import address_problem, expand_user, neighbours

READER_BY_SUFFIX = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".txt": "text",
}
"""Readers by suffix in lower case; a ``.gz`` after the suffix is decompressed."""

_GZIP_MAGIC, _PARQUET_MAGIC = b"\x1f\x8b", b"PAR1"
_FIRST_BYTES = 4096
_MOST_CHARACTERS = 10 * 2**20

MOST_BELOW_A_FOLDER = 200_000
"""Files and folders that are looked at below a folder of data; a home folder has more."""


def local_files(path: str, *, setting: str = "data.path") -> list[str] | None:
    """Return the local files that a path or a glob names, or None for a folder or a hub name.

    Raises:
        DataError: if the path can only be a local one and is not there, a glob matches nothing, the files are of
            unknown or different kinds, or one is empty or does not begin as its suffix says.
    """
    if problem := address_problem(setting, path):
        raise DataError(problem)
    expanded = expand_user(path)
    if expanded.is_dir():
        _refuse_variables(expanded, setting)
        _require_known_files(expanded, setting)
        return None
    if expanded.is_file():
        files = [str(expanded)]
    elif any(sign in path for sign in "*?["):
        files = sorted(file for file in glob.glob(str(expanded), recursive=True) if Path(file).is_file())
        if not files:
            raise DataError(
                f"{setting} is a glob that matches no file: {path} (relative to {Path.cwd()}). Correct it."
            )
    elif not is_hub_name(path):
        raise DataError(
            f"{setting} names a file that does not exist: {path} (relative to {Path.cwd()}).{neighbours(expanded)} "
            "Correct the path, or create the file."
        )
    else:
        return None
    _require_one_kind(files, setting)
    for file in files:
        _refuse_variables(Path(file), setting)
        if wrong := wrong_beginning(file):
            raise DataError(f"{setting}: {file} {wrong}")
    return files


def _refuse_variables(path: Path, setting: str) -> None:
    """Refuse a path with a variable's name in it, such as ``$HOME``: ``datasets`` would read another one."""
    written = str(path.absolute())
    if (read := os.path.expandvars(written)) != written and not is_saved_dataset(path):
        raise DataError(
            f"{setting}: the path {path} has the name of an environment variable in it, by whose value datasets "
            f"replaces that: {read}. Rename it."
        )


def known_files(folder: Path) -> list[Path]:
    """Return the files in a folder, and in those below it, whose suffix has a reader.

    Raises:
        DataError: if so many files and folders are below it that it holds more than data.
    """
    found, seen = [], 0
    for parent, folders, files in os.walk(folder):
        seen += len(folders) + len(files)
        if seen > MOST_BELOW_A_FOLDER:
            raise DataError(
                f"A folder of data holds at most {MOST_BELOW_A_FOLDER:,} files and folders, got {folder}, below which "
                "there are more. Name the subfolder that contains only data."
            )
        found += [path for file in files if reader_of(path := Path(parent, file)) and path.is_file()]
    return sorted(found)


def reader_of(file: str | Path) -> str | None:
    """Return the reader for a file's suffix; None if it has no reader."""
    return READER_BY_SUFFIX.get(_suffix(file))


def is_saved_dataset(folder: Path) -> bool:
    """Return whether ``Dataset.save_to_disk`` wrote a folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def is_hub_name(path: str) -> bool:
    """Return whether the path can name a hub dataset, as nothing local has that name."""
    is_local = expand_user(path).exists() or any(sign in path for sign in "*?[")
    is_local = is_local or "," in path or path.startswith((".", "/", "~"))
    return not (is_local or reader_of(path) or path.count("/") > 1)


def count_of_suffixes(files: list[str]) -> str:
    """Return the number of files of each kind in words, such as ``1 .csv, 2 .jsonl``."""
    counts = Counter(_suffix(file) for file in files)
    return ", ".join(f"{count} {suffix}" for suffix, count in sorted(counts.items()))


def csv_header(file: str, separator: str, setting: str) -> list[str]:
    """Return the column names of a CSV or TSV file.

    Raises:
        DataError: if they are separated by another character, or one occurs twice.
    """
    with _open_text(file, errors="replace") as lines:
        header = next(csv.reader(lines, delimiter=separator), [])
    if len(header) == 1 and (other := next((sign for sign in ";\t|," if sign in header[0]), None)):
        raise DataError(
            f"{setting}: the header of {file} is one column, {header[0]!r}: its cells seem to be separated by "
            f"{other!r}, but a .csv file needs commas and a .tsv file tabs. Save or rename it accordingly."
        )
    if twice := [name for name, count in Counter(header).items() if name and count > 1]:
        raise DataError(
            f"{setting}: the header of {file} names {', '.join(twice)} twice. Rename one of the columns."
        )
    return header


def columns_of(file: str, setting: str) -> list[str] | None:
    """Return the columns of a file if its beginning shows them; None if only its reader can, or something is wrong.

    Args:
        file: a file of a known kind.
        setting: the recipe key that names it, for messages.

    Returns:
        The header of CSV, the schema of Parquet, and for JSON lines the keys of the first 10 MB, which ``datasets``
        itself looks at.

    Raises:
        DataError: if a header is invalid, or JSON is nested too deeply to read.
    """
    reader = reader_of(file)
    if reader == "text":
        return ["text"]
    if reader in ("csv", "tsv"):
        return csv_header(file, "," if reader == "csv" else "\t", setting)
    return _columns_of_parquet(file) if reader == "parquet" else _keys_of_json_lines(file, setting)


def _columns_of_parquet(file: str) -> list[str] | None:
    import pyarrow.parquet  # a fifth of a second, and needs neither torch nor datasets

    try:
        return pyarrow.parquet.read_schema(file).names
    except (OSError, ValueError):  # compressed twice, or damaged
        return None


def _keys_of_json_lines(file: str, setting: str) -> list[str] | None:
    keys: dict[str, None] = {}
    num_characters = 0
    try:
        with _open_text(file) as lines:
            for line in lines:
                num_characters += len(line)
                if num_characters > _MOST_CHARACTERS:
                    break
                row = json.loads(line) if line.strip() else {}
                if not isinstance(row, dict):
                    return None
                keys |= dict.fromkeys(row)
    except RecursionError as error:
        raise DataError(
            f"{setting}: {file} holds JSON that is nested too deeply. Write an object of texts or messages for each "
            "example."
        ) from error
    except (OSError, ValueError, EOFError, zlib.error):
        return None  # a document of many lines, or a damaged file
    return list(keys) or None


_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


class _KeyTwiceError(Exception):
    """Error for a JSON object that names a key twice: Arrow refuses it, and Python takes the last value."""


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if twice := [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]:
        raise _KeyTwiceError(twice[0])
    return dict(pairs)


def malformed_json(file: str) -> str | None:
    """Return which line of a JSON or JSON-lines file is malformed, and its text; None if all lines are valid."""
    try:
        with _open_text(file) as lines:
            for number, line in _whole_or_lines(lines):
                try:
                    value = json.loads(line, object_pairs_hook=_with_each_key_once)
                except RecursionError:
                    seen, why = line, "is nested too deeply"
                except _KeyTwiceError as error:
                    seen, why = line, f"names {str(error)!r} twice in one object"
                except json.JSONDecodeError as error:
                    number, column = number + error.lineno - 1, error.colno
                    seen = line.splitlines()[error.lineno - 1]
                    why = f"is not valid JSON ({error.msg}, column {column})"
                else:
                    half = _HALF_CHARACTER.search(json.dumps(value, ensure_ascii=False))
                    if isinstance(value, dict) and half is None:
                        continue
                    if isinstance(value, list):
                        return _odd_element(file, value)
                    seen, why = (
                        line,
                        "is not a JSON object" if half is None else f"holds {half[0]!r}, half a character",
                    )
                return f"{file}, line {number} {why}: {_shortened(seen)} Fix or remove that line."
    except UnicodeDecodeError as error:
        return f"{file} is not UTF-8 text ({error.reason} at byte {error.start}). Save it as UTF-8."
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        return f"{file} {_damaged(error)}"
    return None


def read_chat_template(path: str) -> str:
    """Read the text of ``data.chat_template``.

    Raises:
        DataError: if there is no such file, or it is not UTF-8 text.
    """
    if _ := address_problem("data.chat_template", path):
        raise DataError(f"data.chat_template is a file on this machine, got the address {path}. Download it.")
    file = expand_user(path)
    try:
        if file.exists() and not file.is_file() and not file.is_dir():  # a pipe would be waited for
            raise OSError(errno.EINVAL, "Not a regular file")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"data.chat_template is a file with a Jinja template, which cannot be read: {path} ({reason})."
            f"{neighbours(file)} Name a UTF-8 text file, or set it to null for the tokenizer's own."
        ) from error


def _open_text(file: str, errors: str = "strict") -> TextIO:
    """Open a text file to read, decompressed if it is a gzip file, whatever its suffix."""
    with open(file, "rb") as raw:
        is_gzip = raw.read(2) == _GZIP_MAGIC
    if is_gzip:
        return gzip.open(file, "rt", encoding="utf-8-sig", errors=errors, newline="")
    return open(file, encoding="utf-8-sig", errors=errors, newline="")


def _whole_or_lines(lines: Any) -> Iterator[tuple[int, str]]:
    """Yield a JSON-lines file's numbered lines, from 1; one document (starting with ``[`` or a lone ``{``) whole."""
    first = lines.readline()
    one_document = first.lstrip().startswith("[") or first.strip() == "{"
    lines.seek(0)
    if one_document:
        yield 1, lines.read().rstrip()
        return
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, line.rstrip()


def _odd_element(file: str, values: list[Any]) -> str | None:
    """Return the sentence about a list that mixes objects or texts with something else."""
    kind = str if values and isinstance(values[0], str) else dict
    for number, value in enumerate(values, start=1):
        if not isinstance(value, kind):
            return (
                f"{file}: element {number} of the list is not {'text' if kind is str else 'a JSON object'}, unlike the "
                f"others: {_shortened(json.dumps(value))} Fix or remove it."
            )
    return None


def wrong_beginning(file: str) -> str | None:
    """Return what is wrong with a file's first bytes, with the way out; None if they match its suffix."""
    size = Path(file).stat().st_size
    if size == 0:
        return "is empty. Name files that hold at least one example."
    with open(file, "rb") as raw:
        begin = raw.read(_FIRST_BYTES)
        if file.lower().endswith(".gz") and not begin.startswith(_GZIP_MAGIC):
            return (
                f"is not a gzip file: it begins with {begin[:16]!r}. Take .gz off its name, or compress it."
            )
        if begin.startswith(_GZIP_MAGIC):
            if reader_of(file) == "parquet":
                return "is compressed twice, because Parquet is compressed already. Unpack it with gunzip."
            raw.seek(0)
            try:
                begin = cast(BinaryIO, gzip.GzipFile(fileobj=raw)).read(_FIRST_BYTES)
            except (OSError, EOFError, zlib.error) as error:
                return _damaged(error)
            if begin.startswith(_GZIP_MAGIC):
                return "is compressed twice. Unpack it once with gunzip."
            if not begin:
                return "is empty after decompression. Name files that hold at least one example."
        elif reader_of(file) == "parquet":
            raw.seek(-min(4, size), 2)
            if not begin.startswith(_PARQUET_MAGIC) or raw.read() != _PARQUET_MAGIC or size < 12:
                return (
                    f"is not a complete Parquet file, which begins and ends with PAR1; it begins with {begin[:16]!r}. "
                    "Copy it again, or give it the suffix of its format."
                )
    return None if reader_of(file) == "parquet" else _not_text(file, begin)


def _damaged(error: Exception) -> str:
    return f"is a damaged gzip file: {error}. Copy or compress it again."


def _not_text(file: str, begin: bytes) -> str | None:
    if begin.startswith(_PARQUET_MAGIC):
        return "is a Parquet file. Give it the suffix .parquet."
    if begin.startswith(b"PK\x03\x04"):
        return "is a zip archive, or an Office document. Unpack it, or save it as CSV or JSON."
    if begin.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "is not UTF-8 text but UTF-16. Save it as UTF-8."
    if b"\0" in begin:
        return f"is not text: it begins with {begin[:16]!r}. Give it the suffix of its format."
    return _not_json(begin) if reader_of(file) == "json" else None


def _not_json(begin: bytes) -> str | None:
    """Return why data is not JSON objects, in lines or in a list; a list of texts is accepted as documents."""
    text = begin.removeprefix(b"\xef\xbb\xbf").lstrip()
    in_list = text.startswith(b"[")
    if in_list:
        text = text[1:].lstrip()
    if not text or text.startswith(b"{") or (in_list and text.startswith((b'"', b"]"))):
        return None
    seen = text.splitlines()[0].decode("utf-8", errors="replace")
    return (
        f"holds {'a list of something else than' if in_list else 'no'} JSON objects, it begins with "
        f"{_shortened(seen, 40)} Write an object such as "
        '{"prompt": "...", "completion": "..."} for each example.'
    )


def _require_known_files(folder: Path, setting: str) -> None:
    if (whole := folder.resolve()) == Path(whole.anchor):
        raise DataError(
            f"{setting} names the data's own folder, got the root of the file system, {folder}. Name it."
        )
    if not is_saved_dataset(folder) and not known_files(folder):
        raise DataError(
            f"{setting}: the folder {folder} holds no {_known_suffixes()} file. Name a folder or file that does."
        )


def _require_one_kind(files: list[str], setting: str) -> None:
    unknown = [file for file in files if reader_of(file) is None]
    if unknown:
        raise DataError(
            f"{setting} takes {_known_suffixes()} files (or .gz of one), got {unknown[0]}. Convert it, or give it the "
            "suffix of its format."
        )
    if len({reader_of(file) for file in files}) > 1:
        raise DataError(
            f"{setting} takes files of one type, but the glob matches {count_of_suffixes(files)}. Narrow it, as in "
            "*.jsonl."
        )


def _suffix(file: str | Path) -> str:
    return Path(str(file).lower().removesuffix(".gz")).suffix


def _known_suffixes() -> str:
    return "/".join(suffix.removeprefix(".") for suffix in READER_BY_SUFFIX)


def _shortened(text: str, limit: int = 120) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "...") + "."
