"""Command lines of the scripts here: the help of each is its docstring, as it is written."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def parser_of(docstring: str | None) -> argparse.ArgumentParser:
    """Return a parser without arguments, whose help is a script's docstring."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=docstring, formatter_class=raw)


def run_by_name(folder: Path, docstring: str | None) -> None:
    """Run the module of a folder that the first argument names, with the arguments after it: ``python FOLDER NAME``.

    Args:
        folder: the folder, in one that Python imports from.
        docstring: what the help begins with.
    """
    modules = {each.stem: each for each in sorted(folder.glob("[a-z]*.py"))}
    lines = [f"  {name:<14}{_first_line(each)}" for name, each in modules.items()]
    if len(sys.argv) < 2 or sys.argv[1] not in modules:
        parser = parser_of("\n".join([docstring or "", "", *lines]))
        parser.add_argument(
            "name", choices=modules, metavar="NAME", help="and its own arguments, such as --help"
        )
        parser.parse_args(sys.argv[1:2])
    name = sys.argv.pop(1)
    sys.argv[0] = f"{sys.argv[0]} {name}"
    importlib.import_module(f"{folder.name}.{name}").main()


def _first_line(module: Path) -> str:
    return (ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def answer_of_new_process(script: str, arguments: Sequence[str]) -> Any:
    """Run a script in a process that has imported nothing yet, and return what the last line of its output says.

    Args:
        script: its file; one of a folder that runs its modules by name is run so.
        arguments: those that make it print one JSON value.

    Raises:
        RuntimeError: if it fails, with the last line of its errors.
    """
    file = Path(script)
    words = [file.parent, file.stem] if file.with_name("__main__.py").exists() else [file]
    done = subprocess.run([sys.executable, *words, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "killed")
    return json.loads(done.stdout.splitlines()[-1])
