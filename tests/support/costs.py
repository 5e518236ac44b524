"""What each test costs: seconds of a core and traces, with those of the processes that it starts.

pytest -p costs --costs costs.jsonl tests        # with -n, too
python tests/support/costs.py costs.jsonl         # sums, and the dearest functions
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

_COUNTS_FOR = pytest.StashKey()
"""For how many cases of its function a test counts."""


def pytest_addoption(parser):
    """Take the file."""
    parser.addoption("--costs", help="a file, to which each test adds a line of JSON")
    parser.addoption(
        "--costs-sample", type=int, help="the most cases of each function that run, drawn at random"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leave of each function what was asked for."""
    cases = {}
    for item in items:
        cases.setdefault(_function(item.nodeid), []).append(item)
    most = config.getoption("costs_sample") or len(items)
    for of_function in cases.values():
        drawn = random.Random(0).sample(of_function, min(most, len(of_function)))
        for item in drawn:
            item.stash[_COUNTS_FOR] = len(of_function) / len(drawn)
    config.hook.pytest_deselected(items=[item for item in items if _COUNTS_FOR not in item.stash])
    items[:] = [item for item in items if _COUNTS_FOR in item.stash]


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
            "counts_for": item.stash[_COUNTS_FOR],
            "slow": item.get_closest_marker("slow") is not None,
        }
        traces.unlink()
        with open(out, "a") as file:
            file.write(json.dumps(row) + "\n")


def _function(test):
    return test.partition("[")[0]


def main(paths: list[str]) -> None:
    """Print the sums, and the functions that cost most."""
    rows = [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]
    tests, seconds, traces = Counter(), Counter(), Counter()
    for row in rows:
        function, counts_for = _function(row["test"]), row["counts_for"]
        tests[function] += counts_for
        seconds[function] += counts_for * row["seconds"]
        traces[function] += counts_for * row["traces"]
    print(
        f"{sum(tests.values()):,.0f} tests, {sum(seconds.values()):,.0f} s, {sum(traces.values()):,.0f} traces"
    )
    for function, taken in seconds.most_common(60):
        print(f"{taken:8.1f} s {tests[function]:5.0f} tests {traces[function]:6.0f} traces  {function}")


if __name__ == "__main__":
    main(sys.argv[1:])
