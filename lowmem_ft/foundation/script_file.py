"""Checks of a training script as a file: the mistakes that show without running it, in less than a second."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.notebook_cells import SUFFIX, read_cells
from lowmem_ft.foundation.user_paths import expand_user, neighbours

_PROCESSES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")
"""Variables that launchers set to the number of processes they start."""

_OF_KERNELS = ("IPython",)
"""Packages that a notebook is given: those that its kernel itself has."""

_COLAB = "google.colab"

_TRAINS = re.compile(r"\b(train|backward|step)\(")
"""A call by which a cell may train: packages that are imported after the last such cell are not needed."""


def check_script(script: str | os.PathLike[str]) -> Path:
    """Return the script's path, if it can be run here at all.

    Args:
        script: a Python file or a notebook, as typed.

    Raises:
        UserError: if there is no such file, it is not Python, it needs packages that are not installed, or this
            process is one of several.
    """
    if not isinstance(script, str | os.PathLike):
        raise UserError(f"A script is the path of a Python file that trains, got {script!r}. Name the file.")
    path = expand_user(script)
    if problem := _file_problem(path, os.fspath(script)):
        raise UserError(problem)
    trees, written = _parsed(path, os.fspath(script))
    problems = [*_launcher_problems(), *_missing_packages(trees, written, path)]
    if problems:
        raise UserError(*problems)
    return path


def _file_problem(path: Path, typed: str) -> str | None:
    if path.is_dir():
        return f"--script takes a Python file, got the folder {typed}. Name the file in it that trains."
    if not path.is_file():
        return f"--script names a file that does not exist: {typed}.{neighbours(path)} Correct the path."
    if path.suffix not in (".py", SUFFIX):
        return (
            f"--script takes a Python file or a notebook, got {typed}. Name one that ends in .py or {SUFFIX}."
        )
    return None


def _launcher_problems() -> Iterator[str]:
    for name in _PROCESSES:
        number = os.environ.get(name, "")
        if number.isdigit() and int(number) > 1:
            yield (
                f"A script is estimated in one process, which a launcher does not start, got {name}={number}. Run "
                f"`lowmem-ft estimate --script` with {name} unset; --gpu {number}xNAME makes it one of as many."
            )


def _parsed(path: Path, typed: str) -> tuple[dict[str, ast.Module], set[str]]:
    """Return the code by where it is in the file, such as ``cell 4, ``, and the modules that a notebook writes.

    Cells after the last that trains are left out.

    Raises:
        UserError: if it is not Python, or the file is not a notebook.
    """
    parts: dict[str, bytes | str] = {}
    written: set[str] = set()
    if path.suffix == SUFFIX:
        cells = read_cells(path, typed)
        last = max((cell.number for cell in cells if _TRAINS.search(cell.code)), default=len(cells))
        for cell in cells[:last]:
            parts[f"cell {cell.number}, "] = cell.code
            written |= {cell.written_module or ""}
    else:
        parts[""] = path.read_bytes()
    return {where: _tree(code, where, path, typed) for where, code in parts.items()}, written


def _tree(code: bytes | str, where: str, path: Path, typed: str) -> ast.Module:
    try:
        return ast.parse(code, os.fspath(path))
    except (SyntaxError, ValueError) as error:
        line = f" in {where}line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UserError(
            f"--script takes Python, but {typed} is not Python{line}: {reason}. Correct it."
        ) from error


def _missing_packages(trees: Mapping[str, ast.Module], written: Collection[str], path: Path) -> list[str]:
    """Return problems with the script's top-level imports; those in functions or ``try`` may be optional."""
    lines: dict[str, str] = {}
    for where, tree in trees.items():
        for statement in tree.body:
            for name in _imported(statement):
                package = _COLAB if name.startswith(_COLAB) else name.partition(".")[0]
                lines.setdefault(package, f"{where}line {statement.lineno}")
    missing = {
        name: line
        for name, line in lines.items()
        if name not in (*written, *(_OF_KERNELS if path.suffix == SUFFIX else ()))
        and not _is_there(name, path.parent)
    }
    return [
        f"{path.name} needs the package {name} ({line}), which {_not_here(name)}"
        for name, line in missing.items()
    ]


def _not_here(name: str) -> str:
    if name == _COLAB:
        return "only Colab has. Leave its lines out, or put them into `try:`."
    if name == "deepspeed":
        return "cannot be traced. Estimate the script with FSDP2, which shards what ZeRO-3 shards."
    return "is not installed here. Install it in the environment of lowmem_ft."


def _imported(statement: ast.stmt) -> Sequence[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        return [statement.module]
    return ()


def _is_there(name: str, folder: Path) -> bool:
    if name in sys.modules or (folder / name).is_dir() or (folder / f"{name}.py").is_file():
        return True
    if name in sys.stdlib_module_names or PathFinder.find_spec(name) is not None:
        return True
    try:
        return importlib.util.find_spec(name) is not None  # installed in another way than as a folder
    except (ImportError, ValueError):
        return False
