"""Every notebook of the documentation prints what it shows."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = (ROOT / "scripts" / "run_notebook.py").read_text()


def shown(file):
    """What the cells of a notebook print; how near a loss comes is the business of a machine's kernels."""
    cells = [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    texts = ["".join(line for output in cell["outputs"] for line in output["text"]) for cell in cells]
    return [re.sub(r"\d+\.\d+", "N", text) for text in texts]


@pytest.mark.parametrize("notebook", sorted((ROOT / "docs").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(notebook, forks, tmp_path):
    copy = tmp_path / notebook.name
    shutil.copy(notebook, copy)
    done = forks.run(RUN, str(copy), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert shown(copy) == shown(notebook)
    assert "".join(shown(copy)).strip(), "it prints something"
