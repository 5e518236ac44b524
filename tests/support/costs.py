"""What each test costs, in seconds of a core and traces with those of its processes; and which cases may wait.

    pytest --costs costs.jsonl tests                            # with -n, too
    pytest --costs slow.jsonl --costs-sample 2 -m slow tests     # two cases of each function count for all of them
    python tests/support/costs.py costs.jsonl slow.jsonl         # sums, and the dearest functions
    python tests/support/costs.py costs.jsonl --keep             # keep which functions take long

Of a function that takes long, ``make test`` runs one case, and ``make test-traced`` the others.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest

KEPT = Path(__file__).with_name("tests_that_take_long.json")
"""Seconds of a core that the dearest case of a function takes, in files from the root: of those above :data:`LONG`."""

LONG = 1.0

_COUNTS_FOR = pytest.StashKey()
"""For how many cases of its function a test counts."""


def pytest_addoption(parser):
    """Take the file."""
    parser.addoption("--costs", help="a file, to which each test adds a line of JSON")
    parser.addoption(
        "--costs-sample", type=int, help="the most cases of each function that run, drawn at random"
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark tests before pytest looks at marks, and leave of each function what was asked for after that."""
    mark(items)
    yield
    cases = {}
    for item in items:
        cases.setdefault(_function(item.nodeid), []).append(item)
    most = config.getoption("costs_sample") or len(items)
    for of_function in cases.values():
        drawn = random.Random(0).sample(of_function, min(most, len(of_function)))
        for item in drawn:
            item.stash[_COUNTS_FOR] = len(of_function) / len(drawn)
    config.hook.pytest_deselected(items=[item for item in items if _COUNTS_FOR not in item.stash])
    left = [item for item in items if _COUNTS_FOR in item.stash]
    # Several processes end together if the longest begin; one runs in the order that was asked for.
    items[:] = _longest_first(left) if hasattr(config, "workerinput") else left


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


def mark(items):
    """Mark what ``make test`` leaves out ``traced``: of a function that takes long (:data:`KEPT`), all but one case."""
    takes_long, seen = json.loads(KEPT.read_text("utf-8")), set()
    for item in items:
        function = _function(item.nodeid)
        if function in takes_long and not any(map(item.get_closest_marker, ("slow", "gpu"))):
            if function in seen:
                item.add_marker("traced")
            seen.add(function)


def _longest_first(items):
    """Return the tests, modules that take longest first; those of a module share its fixtures and stay together."""
    takes_long, of_modules = json.loads(KEPT.read_text("utf-8")), Counter()
    for function in {_function(item.nodeid): None for item in items}:
        of_modules[function.partition("::")[0]] += takes_long.get(function, 0)
    return sorted(items, key=lambda item: -of_modules[item.nodeid.partition("::")[0]])


def main() -> None:
    """Print the sums, and the functions that cost most."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--keep", action="store_true", help=f"write {KEPT.name}")
    args = parser.parse_args()
    rows = [json.loads(line) for path in args.files for line in path.read_text("utf-8").splitlines()]
    tests, seconds, traces, dearest = Counter(), Counter(), Counter(), Counter()
    for row in rows:
        function, counts_for = _function(row["test"]), row["counts_for"]
        tests[function] += counts_for
        seconds[function] += counts_for * row["seconds"]
        traces[function] += counts_for * row["traces"]
        if not row["slow"]:
            dearest[function] = max(dearest[function], row["seconds"])
    if args.keep:
        kept = {
            function: round(dearest[function]) for function in sorted(dearest) if dearest[function] >= LONG
        }
        KEPT.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    print(
        f"{sum(tests.values()):,.0f} tests, {sum(seconds.values()):,.0f} s, {sum(traces.values()):,.0f} traces"
    )
    for function, taken in seconds.most_common(60):
        print(f"{taken:8.1f} s {tests[function]:5.0f} tests {traces[function]:6.0f} traces  {function}")


if __name__ == "__main__":
    main()
