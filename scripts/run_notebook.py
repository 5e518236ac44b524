"""Run a notebook's cells in a new folder, and write what they print into it as their outputs.

    python scripts/run_notebook.py docs/first_run.ipynb

Run it when the notebook has changed, or what it prints; a test runs it, too. Its cells are plain Python: Jupyter is not
needed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the notebook and replace its outputs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebook", type=Path)
    file = parser.parse_args().notebook.resolve()
    notebook = json.loads(file.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        run(notebook)
        os.chdir(file.parent)
    file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


def run(notebook: dict[str, Any]) -> None:
    """Execute the code cells one after the other, in one namespace, and set their outputs to what they print."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
        lines = printed.getvalue().splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []


if __name__ == "__main__":
    main()
