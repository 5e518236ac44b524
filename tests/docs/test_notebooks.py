"""Every notebook of the documentation prints what it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def without_decimals(text):
    """How near a loss comes is the business of a machine's kernels."""
    return re.sub(r"\d+\.\d+", "N", text)


@pytest.mark.parametrize("notebook", sorted(DOCS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(notebook, forks, tmp_path):
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    shown = "".join(line for cell in cells for output in cell["outputs"] for line in output["text"])
    done = forks.run("\n".join("".join(cell["source"]) for cell in cells), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert without_decimals(done.stdout) == without_decimals(shown)
    assert shown.strip(), "it prints something"
