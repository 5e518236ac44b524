"""What each test costs: seconds of a core and traces, with those of the processes that it starts.

pytest -p costs --costs costs.jsonl tests        # with -n, too
python tests/support/costs.py costs.jsonl         # sums, and the dearest functions
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest


def pytest_addoption(parser):
    """Take the file."""
    parser.addoption("--costs", help="a file, to which each test adds a line of JSON")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Add a line for a test with its fixtures."""
    out = item.config.getoption("costs")
    if not out:
        return (yield)
    from lowmem_ft.virtual_gpu.tracing_machine import COUNTED_IN  # after what conftest.py sets before imports

    traces = Path(f"{out}.{os.getpid()}")
    os.environ[COUNTED_IN] = str(traces)
    traces.write_text("")
    before = os.times()
    try:
        return (yield)
    finally:
        after = os.times()
        row = {
            "test": item.nodeid,
            "seconds": round(sum(after[:4]) - sum(before[:4]), 2),
            "traces": traces.read_text().count("\n"),
            "slow": item.get_closest_marker("slow") is not None,
        }
        traces.unlink()
        with open(out, "a") as file:
            file.write(json.dumps(row) + "\n")


def main(path: str) -> None:
    """Print the sums, and the functions that cost most."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    seconds, traces = Counter(), Counter()
    for row in rows:
        function = row["test"].partition("[")[0]
        seconds[function] += row["seconds"]
        traces[function] += row["traces"]
    print(f"{len(rows):,} tests, {sum(seconds.values()):,.0f} s, {sum(traces.values()):,} traces")
    for function, taken in seconds.most_common(40):
        print(f"{taken:8.1f} s {traces[function]:5} traces  {function}")


if __name__ == "__main__":
    main(sys.argv[1])
