"""The tests that need a GPU, a row for each, those of the ladder first: no other device can be late with its copies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIRST = ("rung", "late")
"""Parts of the names of the tests that come first; then come those of whole runs."""

Tell = Callable[[dict[str, Any]], None]


class RowOfEachTest:
    """Plugin of pytest: orders the tests, leaves out those that have a row, and tells how each ended.

    Args:
        tell: takes a row.
        there: names of tests that have one.
    """

    def __init__(self, tell: Tell, there: Collection[str]) -> None:
        self._tell, self._there = tell, there

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Put the ladder's tests first."""
        left = [item for item in items if item.nodeid not in self._there]
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self._there])
        items[:] = sorted(
            left,
            key=lambda item: (
                not any(part in item.name for part in FIRST),
                "test_train_on_gpu.py" not in item.nodeid,
            ),
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Say which test begins: it is named if it does not end."""
        self._tell({"begins": nodeid})

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Tell a test's end: of a test that was set up, its call; else what stopped its setup."""
        if report.when == "call" or (report.when == "setup" and not report.passed):
            row: dict[str, Any] = {"part": report.nodeid, "seconds": round(report.duration, 2)}
            row["outcome"] = {"passed": "measured", "skipped": "left out"}.get(report.outcome, "failed")
            if not report.passed:
                row["why"] = str(report.longrepr)[-2000:]
            self._tell(row)


def files() -> list[str]:
    """Return the files with tests that need a GPU: all others would only be collected, which takes a minute."""
    return sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if any(mark in path.read_text() for mark in ("mark.gpu", "on_cuda(")) and "lease" not in path.name
    )


def run(tell: Tell, there: Collection[str], tests: Sequence[str] = ()) -> None:
    """Run them until one fails.

    Args:
        tell: takes a row.
        there: names of tests that have one already.
        tests: other tests to run in their place.

    Raises:
        RuntimeError: if pytest could not run them.
    """
    asked = tests or ("-m", "gpu", *files())
    code = pytest.main(["-x", "-p", "no:cacheprovider", *asked], plugins=[RowOfEachTest(tell, there)])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest ended with {code!r}")
