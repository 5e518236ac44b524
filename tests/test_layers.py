"""How the package imports itself."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_contributing_lists_the_layers_that_lint_imports_checks():
    import tomllib

    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = pyproject["tool"]["importlinter"]["contracts"]
    listed = re.search(r"## Layers\n.*?```\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    assert listed is not None
    assert listed[1].splitlines() == [layer.replace(" : ", ", ") for layer in contract["layers"]]
