"""Benchmarks, by name: what this package takes, alone or next to others."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])

from command_line import run_by_name  # noqa: E402 - which is there now

if __name__ == "__main__":
    run_by_name(Path(__file__).parent, __doc__)
