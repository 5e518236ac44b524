"""Programs in which Triton's interpreter is on or off, whatever it is here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_with_triton(program: str, folder: Path, *arguments: Any, interpret: bool, **variables: str) -> Any:
    """Return what a program prints as JSON; it finds modules where this process does."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TRITON_INTERPRET": str(int(interpret)),
        "TRITON_CACHE_DIR": str(folder),
        **variables,
    }
    command = [sys.executable, "-c", program, *map(json.dumps, arguments)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)
