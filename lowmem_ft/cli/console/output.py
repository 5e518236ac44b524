"""Output of a command: documents on the terminal, JSON and pictures in files."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.reports.text.document import Document


class Output:
    """Stdout, as a document that grows; if the JSON goes to stdout, the document goes to stderr.

    Args:
        json_to: file for the JSON; ``-`` is stdout; None: no JSON.
    """

    def __init__(self, json_to: str | None = None) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # for what its encoding lacks
        self._json_to = json_to
        self._console = Console(stderr=json_to == "-", highlight=False, markup=False, emoji=False)
        self._is_empty = True

    def add(self, *blocks: RenderableType | None) -> None:
        """Print blocks of a :class:`~lowmem_ft.reports.text.document.Document`, below what was printed before."""
        if document := Document(*blocks):
            if not self._is_empty:
                self._console.print()
            # A longer word goes beyond the edge rather than breaks.
            self._console.print(document, soft_wrap=True)
            self._is_empty = False

    def write_json(self, values: dict[str, Any]) -> None:
        """Write the values as JSON, to a file or alone to stdout, if the user asked for it."""
        text = json.dumps(values, indent=2)
        if self._json_to == "-":
            print(text)
        elif self._json_to is not None:
            with writing("json", self._json_to) as path:
                path.write_text(f"{text}\n", encoding="utf-8")


@contextlib.contextmanager
def writing(option: str, name: str) -> Iterator[Path]:
    """Yield the path of a file to write; raise an error with the option's name if that fails."""
    try:
        yield Path(name)
    except OSError as error:
        raise UserError(f"--{option} cannot write {name}: {error.strerror}. Name another file.") from error
