"""Every Python example of the documentation runs as it stands."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
OPTIONAL = ("peft", "bitsandbytes", "trl")


def examples():
    for page in sorted(DOCS.glob("*.md")):
        for number, block in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)):
            yield pytest.param(block, id=f"{page.stem}-{number}")


def test_there_are_examples():
    assert len(list(examples())) >= 4


@pytest.mark.parametrize("source", examples())
def test_the_example_runs(source, tmp_path):
    missing = [
        name for name in OPTIONAL if f"from {name}" in source and importlib.util.find_spec(name) is None
    ]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    script = tmp_path / "example.py"
    script.write_text(source)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "fits" in done.stdout
