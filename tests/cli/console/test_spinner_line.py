"""The sign of life is one line: of two, a terminal keeps the first each time that the spinner turns."""

from __future__ import annotations

import io

import pytest
import rich
from rich.console import Console

from lowmem_ft.cli.console.spinner import progress_line

LONG = "[models] /home/somebody/" + "folder/" * 20


@pytest.fixture
def terminal(monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True, width=80, legacy_windows=False)
    monkeypatch.setattr(rich, "get_console", lambda: console)
    return console


def test_it_never_wraps(terminal):
    with progress_line(LONG) as say:
        say(f"{LONG}: tracing")
    drawn = terminal.file.getvalue()
    assert "[models] /home/somebody/folder" in drawn
    assert drawn.count("\n") == 1  # at its end
