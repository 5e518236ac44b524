"""Scripts that run by name: each is listed, and gets the arguments after its name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def said_by(*words):
    command = [sys.executable, SCRIPTS / words[0], *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("folder", ["bench", "calibrate"])
def test_each_is_listed_and_another_is_refused(folder):
    names = {file.stem for file in (SCRIPTS / folder).glob("[a-z]*.py")}
    listed = said_by(folder, "--help")
    assert listed.returncode == 0
    assert names <= {line.split()[0] for line in listed.stdout.splitlines() if line.startswith("  ")}
    refused = said_by(folder, "nothing")
    assert refused.returncode == 2
    assert all(name in refused.stderr for name in names)


def test_one_that_is_named_gets_its_own_arguments():
    help_of_ranges = said_by("calibrate", "ranges", "--help")
    assert help_of_ranges.returncode == 0
    assert "usage: calibrate ranges" in help_of_ranges.stdout
    assert "--rows" in help_of_ranges.stdout
