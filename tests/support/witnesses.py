"""Defects planted one at a time, and the tests that see them: how well the tests would notice.

    python tests/support/witnesses.py --count 24 --seed 1 [--out seen.json]      # some two hours of a core
    python tests/support/witnesses.py --only 'lowmem_ft.planning.planner.bounds:device_bytes sign 2'

Each defect is a small change by one of four operators, in a function drawn by the seed: first a room of the package,
then an operator, then a place. It is planted in a copy of a commit, and the tests that can reach its file run
against it, nearest first, for six minutes of a core at most: ``seen by`` the one that failed, ``unseen`` if all
passed, ``not in time`` if those that ran did. A defect that changes nothing is struck by hand, with its reason.

Two commits are compared by defects that are drawn from one of them and planted in each. What was seen in one is sought
in the other by the same test first; what was not cannot make the count smaller:

    python tests/support/witnesses.py --at BEFORE --out before.json
    python tests/support/witnesses.py --drawn-from BEFORE --seen-before before.json --out after.json
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from reached_tests import REPOSITORY, Imports

SECONDS = 360
"""Seconds of a core for the tests against one defect, so that other work on the machine makes no difference."""

OFF_BY = 1.15


@dataclass(frozen=True, kw_only=True)
class Defect:
    """A change to one file.

    Args:
        path: the file, from the root of the repository.
        name: module and qualified name, operator, and number of the place among those of the same name and operator.
        start: offset of the text to replace, in bytes of UTF-8.
        stop: offset of its end.
        text: what comes in its place.
    """

    path: str
    name: str
    start: int
    stop: int
    text: str

    def planted(self, source: bytes) -> bytes:
        """Return the file's text with the defect."""
        return source[: self.start] + self.text.encode() + source[self.stop :]


class _File:
    """A file and its syntax tree.

    Args:
        path: where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source = path.read_bytes()
        self.tree = ast.parse(self.source)
        self._lines = [0]
        for line in self.source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, stop = self._lines[node.lineno - 1] + node.col_offset, self._lines[node.end_lineno - 1]
        return start, stop + node.end_col_offset

    def between(self, one: ast.expr, other: ast.expr) -> tuple[int, int]:
        return self.span(one)[1], self.span(other)[0]

    def text(self, start: int, stop: int) -> str:
        return self.source[start:stop].decode()


Change = tuple[int, int, str]


def _wrong_signs(file: _File, node: ast.AST) -> Iterator[Change]:
    """Yield sums that become differences, and the reverse."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        is_text = any(
            isinstance(one, ast.JoinedStr | ast.List | ast.Tuple | ast.Dict) for one in ast.walk(node)
        )
        is_text |= any(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in ast.walk(node))
        start, stop = file.between(node.left, node.right)
        sign, other = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
        if not is_text and file.text(start, stop).count(sign) == 1:
            yield start, stop, file.text(start, stop).replace(sign, other)


def _dropped_conditions(file: _File, node: ast.AST) -> Iterator[Change]:
    """Yield one of several conditions that is left out, and a case that never happens."""
    if isinstance(node, ast.BoolOp):
        for before, dropped in zip(node.values, node.values[1:], strict=False):
            yield file.span(before)[1], file.span(dropped)[1], ""
    if isinstance(node, ast.If) and not isinstance(node.test, ast.BoolOp) and _ends(node.body):
        yield *file.span(node.test), "False"


def _ends(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _bounds_off(file: _File, node: ast.AST) -> Iterator[Change]:
    """Yield numbers that are 15% too large, in comparisons and arithmetic; the least whole ones would not change."""
    if isinstance(node, ast.Compare | ast.BinOp):
        for one in ast.iter_child_nodes(node):
            if isinstance(one, ast.Constant) and isinstance(one.value, int | float) and abs(one.value) > 6:
                yield *file.span(one), repr(type(one.value)(one.value * OFF_BY))


def _forgotten_restores(file: _File, node: ast.AST) -> Iterator[Change]:
    """Yield statements that put something back, left out: those of ``finally``, and those after a ``yield``."""
    if isinstance(node, ast.Try) and node.finalbody:
        yield *file.span(node.finalbody[0]), "pass"
    if isinstance(node, ast.FunctionDef):
        is_yield = [isinstance(one, ast.Expr) and isinstance(one.value, ast.Yield) for one in node.body]
        if True in is_yield[:-1] and "contextmanager" in "".join(map(ast.unparse, node.decorator_list)):
            yield *file.span(node.body[is_yield.index(True) + 1]), "pass"


OPERATORS: dict[str, Callable[[_File, ast.AST], Iterator[Change]]] = {
    "sign": _wrong_signs,
    "condition": _dropped_conditions,
    "bound": _bounds_off,
    "restore": _forgotten_restores,
}


def defects_in(path: Path, repository: Path = REPOSITORY) -> list[Defect]:
    """Return every defect that could be planted in a file."""
    file, found = _File(path), []
    place = path.relative_to(repository)
    module = ".".join(place.with_suffix("").parts)
    numbers: dict[str, int] = {}

    def visit(node: ast.AST, names: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = (*names, node.name)
        for operator, changes in OPERATORS.items():
            for start, stop, text in changes(file, node) if names else ():
                name = f"{module}:{'.'.join(names)} {operator}"
                numbers[name] = numbers.get(name, 0) + 1
                found.append(
                    Defect(path=str(place), name=f"{name} {numbers[name]}", start=start, stop=stop, text=text)
                )
        for child in ast.iter_child_nodes(node):
            visit(child, names)

    visit(file.tree, ())
    return found


def drawn(count: int, seed: int, repository: Path = REPOSITORY) -> list[Defect]:
    """Return defects of as many rooms as there are, before a second one of a room."""
    rooms: dict[Path, list[Defect]] = {}
    for path in sorted((repository / "lowmem_ft").rglob("*.py")):
        rooms.setdefault(path.parent, []).extend(defects_in(path, repository))
    chance, chosen = random.Random(seed), []
    while len(chosen) < count:
        for room in chance.sample(sorted(rooms), len(rooms)):
            operators = sorted({one.name.split()[1] for one in rooms[room]})
            if operators:
                operator = chance.choice(operators)
                one = chance.choice([one for one in rooms[room] if one.name.split()[1] == operator])
                rooms[room].remove(one)
                chosen.append(one)
    return chosen[:count]


def _named(name: str, repository: Path) -> list[Defect]:
    path = repository / f"{name.partition(':')[0].replace('.', '/')}.py"
    defects = defects_in(path, repository) if path.exists() else []
    return [one for one in defects if one.name == name]


def seen_by(defect: Defect, tree: Path, known: str | None = None) -> str:
    """Plant a defect in a checkout, run the tests that reach it, and take it out again.

    A test counts if it fails twice with the defect and passes without: some fail on a busy machine.

    Args:
        defect: what to plant.
        tree: the checkout.
        known: a test that saw it elsewhere, and is tried first, if it is there.

    Returns:
        The test that failed, or why there is none.
    """
    path, left = tree / defect.path, float(SECONDS)
    source = path.read_bytes()
    tests = [str(test.relative_to(tree)) for test in Imports(tree).tests_of([path])]
    if known is not None:
        collected, _ = _pytest(tree, ["--collect-only", known], SECONDS)
        tests = [known, *tests] if collected and not collected.returncode else tests
    doubtful: list[str] = []
    try:
        while True:
            path.write_bytes(defect.planted(source))
            skipped = [word for test in doubtful for word in ("--deselect", test)]
            done, taken = _pytest(tree, [*tests, *skipped], left)
            left -= taken
            if done is None:
                return "not in time"
            if done.returncode == 0:
                return "unseen"
            failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
            if failed is None:
                return "seen by tests that do not start"
            again, _ = _pytest(tree, [failed[1]], SECONDS)
            path.write_bytes(source)
            without, _ = _pytest(tree, [failed[1]], SECONDS)
            if again and again.returncode and without and not without.returncode:
                return f"seen by {failed[1]}"
            doubtful.append(failed[1])
    finally:
        path.write_bytes(source)


def _pytest(
    tree: Path, arguments: Sequence[str], seconds: float
) -> tuple[subprocess.CompletedProcess[str] | None, float]:
    """Return what tests said, None if they took more seconds of a core, and the seconds that they took."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-m",
        "not slow and not gpu",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as said:
        tests = subprocess.Popen(command, cwd=tree, env=environment, stdout=said, stderr=subprocess.STDOUT)
        process = psutil.Process(tests.pid)
        taken = 0.0
        while tests.poll() is None:
            taken = max(taken, _seconds_of(process))
            if taken > seconds:
                for one in [*process.children(recursive=True), process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
                tests.wait()
                return None, taken
            time.sleep(0.2)
        said.seek(0)
        return subprocess.CompletedProcess(command, tests.returncode, said.read()), taken


def _seconds_of(process: psutil.Process) -> float:
    """Return the seconds of a core that a process, its children, and those that ended before took."""
    seconds = 0.0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def main() -> None:
    """Plant, and print what each test run said."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="the name of one defect")
    parser.add_argument("--at", default="HEAD", metavar="REVISION", help="HEAD by default")
    parser.add_argument("--drawn-from", metavar="REVISION", help="draw from this one; from --at by default")
    parser.add_argument("--seen-before", type=Path, help="--out of another commit: try what was seen there")
    parser.add_argument("--list", action="store_true", help="name those that would be planted")
    parser.add_argument("--out", type=Path, help="JSON of the results; those it has are not repeated")
    args = parser.parse_args()
    results: dict[str, str] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    before: dict[str, str] = json.loads(args.seen_before.read_text()) if args.seen_before else {}
    with _checkout(args.drawn_from or args.at) as tree:
        names = [args.only] if args.only else [one.name for one in drawn(args.count, args.seed, tree)]
    with _checkout(args.at) as tree:
        for name in names:
            if name in results:
                continue
            defects = _named(name, tree)
            if args.list or not defects:
                results[name] = "drawn" if defects else "not there"
            elif before and not before[name].startswith("seen by "):
                results[name] = "not seen before, and not tried"
            else:
                results[name] = seen_by(
                    defects[0], tree, before.get(name, "").removeprefix("seen by ") or None
                )
            print(f"{name}: {results[name]}", flush=True)
            if args.out and not args.list:
                args.out.write_text(json.dumps(results, indent=1) + "\n")


@contextlib.contextmanager
def _checkout(revision: str) -> Iterator[Path]:
    """Yield a folder with the files of a commit, for the time of a block."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        git = ["git", "-C", str(REPOSITORY), "worktree"]
        subprocess.run([*git, "add", "--detach", str(tree), revision], check=True, capture_output=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True, capture_output=True)


if __name__ == "__main__":
    main()
