"""The picture of a terminal shows what its command prints now."""

from __future__ import annotations

import subprocess
import sys

import pictures
import pytest


@pytest.mark.slow
def test_the_terminal_shows_what_the_command_prints():
    words = [sys.executable, pictures.__file__, "--check"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, f"run `python scripts/pictures.py`\n{done.stdout}\n{done.stderr}"
