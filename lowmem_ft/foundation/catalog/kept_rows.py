"""Small JSON files of what was measured on this machine, in the user's cache folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowmem_ft.foundation.system.atomic_write import whole_file

logger = logging.getLogger(__name__)

MOST_BYTES = 2**20
"""The most bytes that are read: a longer file was not written here."""


def read_rows(file: Path | None) -> list[Any]:
    """Return the rows of a file, of whatever type they are; none where there is no file, or none that can be read."""
    if file is None or not file.is_file():
        return []
    try:
        with file.open("rb") as stream:
            rows = json.loads(stream.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        logger.info("The measurements in %s cannot be read, and are not used: %s.", file, error)
        return []
    return rows if isinstance(rows, list) else []


def write_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a file, whole or not at all.

    Raises:
        OSError: if it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(file, is_cache=True) as stream:
        stream.write(json.dumps(rows, indent=1).encode())
