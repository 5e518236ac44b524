"""The picture of a terminal shows what its command prints now."""

from __future__ import annotations

import subprocess
import sys

import pictures
import pytest
from drawings import elements

OUTPUT = """\
\x1b[1;32mtiny fits\x1b[0m on t4
verdict  with 10.0 GiB to spare
cost     1 dollar
         a second line of it
choices  none
versions torch 2.13.0
"""


def test_a_planted_difference_is_told(monkeypatch, tmp_path):
    picture, options = tmp_path / "estimate.svg", []
    output = OUTPUT
    monkeypatch.setattr(pictures, "TERMINAL", picture)
    monkeypatch.setattr(pictures, "printed", lambda *further: options.append(further) or output)

    def ends_with(*words):
        monkeypatch.setattr(sys, "argv", ["pictures.py", *words])
        return pictures.main()

    assert ends_with() == 0
    assert options == [(), ("--plot", str(pictures.MEMORY), "--overwrite")]
    drawn = picture.read_text("utf-8")
    shown = [one.text for one in elements(drawn, "text")]
    assert shown[1:] == [
        "tiny fits",
        "on t4",
        "verdict  with 10.0 GiB to spare",
        "cost     1 dollar",
        "a second line of it",
        "[...]",
    ]
    assert ends_with("--check") == 0
    output = OUTPUT.replace("10.0", "9.00")
    assert ends_with("--check") == 1
    assert picture.read_text("utf-8") == drawn


@pytest.mark.slow
def test_the_terminal_shows_what_the_command_prints():
    words = [sys.executable, pictures.__file__, "--check"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, f"run `python scripts/pictures.py`\n{done.stdout}\n{done.stderr}"
