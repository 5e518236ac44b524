"""The tests that can reach a module, by the imports of both: ``make test-changed``.

    python tests/support/reached_tests.py [--since REVISION]     # the tests that reach what has changed, nearest first

A test reaches what it imports, what its helpers import, and what these import in turn. A test that starts commands by
their names reaches more than that; CI runs all of them.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = (REPOSITORY, REPOSITORY / "scripts", REPOSITORY / "tests", REPOSITORY / "tests" / "support")
"""Folders whose files are imported by their names from there (``pythonpath`` in pyproject.toml)."""


class Imports:
    """The imports between all files of package, scripts and tests.

    Args:
        repository: the root of a checkout.
    """

    def __init__(self, repository: Path = REPOSITORY) -> None:
        roots = [repository / root.relative_to(REPOSITORY) for root in ROOTS]
        files = [
            path for name in ("lowmem_ft", "scripts", "tests") for path in (repository / name).rglob("*.py")
        ]
        self._file_of = {
            name: path for root in reversed(roots) for path in files for name in _names_below(root, path)
        }
        self._importers: dict[Path, set[Path]] = {}
        for path in files:
            for imported in self._imported_by(path):
                self._importers.setdefault(imported, set()).add(path)
        self._tests = [path for path in files if path.name.startswith("test_")]

    def tests_of(self, changed: Iterable[Path]) -> list[Path]:
        """Return the test files that reach some files, those with the fewest imports between first.

        Args:
            changed: absolute paths; a ``conftest.py`` is reached by all tests of its folder.
        """
        distance: dict[Path, int] = dict.fromkeys(changed, 0)
        waiting = deque(distance)
        while waiting:
            path = waiting.popleft()
            importers = self._importers.get(path, set())
            if path.name == "conftest.py":
                importers = importers | {test for test in self._tests if path.parent in test.parents}
            for importer in importers - distance.keys():
                distance[importer] = distance[path] + 1
                waiting.append(importer)
        return sorted(
            (test for test in self._tests if test in distance), key=lambda test: (distance[test], test)
        )

    def _imported_by(self, path: Path) -> Iterator[Path]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                if name in self._file_of:
                    yield self._file_of[name]


def _names_below(root: Path, path: Path) -> Iterator[str]:
    if root in path.parents:
        parts = path.relative_to(root).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _changed(since: str) -> list[Path]:
    """Return the Python files that differ from a revision, new ones included."""
    commands = (["diff", "--name-only", since], ["ls-files", "--others", "--exclude-standard"])
    lines = [
        line
        for command in commands
        for line in subprocess.run(
            ["git", *command], cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    ]
    return [REPOSITORY / line for line in lines if line.endswith(".py")]


def main() -> None:
    """Print the tests, one path a line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--since", default="HEAD", metavar="REVISION", help="HEAD by default")
    for test in Imports().tests_of(_changed(parser.parse_args().since)):
        print(test.relative_to(REPOSITORY))


if __name__ == "__main__":
    main()
