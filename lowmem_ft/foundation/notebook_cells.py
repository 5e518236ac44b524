"""Code cells of a Jupyter notebook, as Python: what IPython adds to the language becomes calls of ``get_ipython()``.

IPython's own ``TransformerManager`` does the same. It is not used: an estimate should not need IPython, which few of
the machines that train have outside Jupyter; the body of ``%%time`` has to stay a part of the cell, where IPython makes
a string of it; and what it adds is a matter of single lines, which has not changed since notebooks have the format that
is read here. Only where one might stand inside a string or brackets, Python's own tokenizer is asked.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowmem_ft.foundation.errors import UserError

SUFFIX = ".ipynb"

_FORMAT = 4
_RUN_THEIR_BODY = ("time", "prun", "capture")
"""Magics whose line or cell is Python that they run."""

_WRITE = ("writefile", "file")
_WITHOUT_ESCAPE = ("pip", "conda", "mamba", "uv", "cd", "ls", "cat", "mkdir", "cp", "mv", "rm")
"""Commands that people write without ``%`` or ``!``, alone in a cell, where IPython takes them for what they are."""

_CELL_MAGIC = re.compile(r"(?P<before>(?:[ \t]*(?:#.*)?\n)*)%%(?P<name>\w+)(?P<line>[^\n]*)\n?")
_ESCAPED = re.compile(
    r"(?P<indent>\s*)(?P<target>[A-Za-z_][\w.,\s\[\]'\"]*=\s*)?(?P<escape>!!?|%|\?\??)(?P<rest>.*)$"
)
_HELP = re.compile(r"(?P<indent>\s*)(?P<name>%{0,2}[\w.*]+)\?\??\s*$")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A code cell.

    Args:
        number: its number among the code cells that are not empty: that of ``In [4]`` once all were run in order.
        source: its text.
        code: the same in Python, each line where the text has it.
    """

    number: int
    source: str
    code: str

    @property
    def written_module(self) -> str | None:
        """The name of a Python module that the cell writes; None: it writes none."""
        magic = _CELL_MAGIC.match(self.source)
        words = magic["line"].split() if magic and magic["name"] in _WRITE else [""]
        return Path(words[-1]).stem if words and words[-1].endswith(".py") else None


def cell_file(notebook: Path, cell: Cell) -> str:
    """Return the file name that a cell's code has in tracebacks."""
    return f"{notebook}, cell {cell.number}"


def is_of_cell(file: str) -> bool:
    """Return whether a file name is a cell's."""
    return f"{SUFFIX}, cell " in file


def read_cells(path: Path, typed: str) -> list[Cell]:
    """Read a notebook's code cells; its outputs and everything else are ignored.

    Args:
        path: its file.
        typed: the path as typed, for errors.

    Raises:
        UserError: if it is no notebook of format 4, or has no code, or none in Python.
    """
    try:
        notebook = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise UserError(
            f"A notebook is JSON, but {typed} is not in line {error.lineno}: {error.msg}. Save it again in Jupyter."
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"A notebook is text, but {typed} is not. Name a notebook.") from error
    if problem := _problem_of(notebook, typed):
        raise UserError(problem)
    sources = (
        "".join(cell.get("source") or "").replace("\r\n", "\n")
        for cell in notebook["cells"]
        if cell.get("cell_type") == "code"
    )
    cells = [
        Cell(number=number, source=source, code=_cell_in_python(source))
        for number, source in enumerate(filter(str.strip, sources), 1)
    ]
    if not cells:
        raise UserError(f"A notebook that is run has code, but {typed} has no code cell. Name another.")
    return cells


def _problem_of(notebook: Any, typed: str) -> str | None:
    if not isinstance(notebook, dict) or not {"cells", "worksheets"} & notebook.keys():
        return f"A notebook has a list of cells, but {typed} has none. Name a notebook."
    number = notebook.get("nbformat")
    if number != _FORMAT or not isinstance(notebook.get("cells"), list):
        return (
            f"Notebooks of format {_FORMAT} are run, got {typed} of format {number}. Run: jupyter nbconvert --to "
            f"notebook --nbformat {_FORMAT} {typed}"
        )
    language = _language_of(notebook.get("metadata") or {})
    if not language.lower().startswith(("python", "ipython")):
        return f"A notebook is run if it is in Python, got {typed} in {language}. Name one in Python."
    return None


def _language_of(metadata: dict[str, Any]) -> str:
    kernel, info = metadata.get("kernelspec") or {}, metadata.get("language_info") or {}
    name = str(kernel.get("name", ""))
    of_kernel = "R" if name == "ir" else "Julia" if name.startswith("julia") else "Python"
    return str(info.get("name") or kernel.get("language") or of_kernel)


def _cell_in_python(source: str) -> str:
    """Return a cell's text as Python, with as many lines at least, each in its place.

    Commands become what they are for IPython, too: ``get_ipython().system("pip install trl")``, ``getoutput``,
    ``run_line_magic`` and ``run_cell_magic``. Python that is timed or captured stays, without the magic.
    """
    magic = _CELL_MAGIC.match(source)
    if magic is None:
        return _lines_in_python(_with_escape(source))
    name, line, body = magic["name"], magic["line"].strip(), source[magic.end() :]
    if name not in _RUN_THEIR_BODY:
        return magic["before"] + _call("run_cell_magic", name, line, body)
    captured = [word for word in line.split() if name == "capture" and word.isidentifier()]
    after = "".join(f"\n{word} = get_ipython().captured()" for word in captured)
    return f"{magic['before']}\n{_cell_in_python(body)}{after}"


def _with_escape(source: str) -> str:
    command = source.strip()
    word = command.partition(" ")[0]
    if word not in _WITHOUT_ESCAPE or "\n" in command:
        return source
    if word == command:
        return source.replace(word, f"%{word}", 1)
    try:
        ast.parse(command)
    except SyntaxError:
        return source.replace(word, f"%{word}", 1)
    return source


def _lines_in_python(source: str) -> str:
    done: list[str] = []
    lines = iter(source.split("\n"))
    for line in lines:
        found = _ESCAPED.match(line) or _HELP.match(line)
        if found is None or not _may_begin_statement(done):
            done.append(line)
        else:
            done.extend(_in_python(line, lines))
    return "\n".join(done)


def _in_python(line: str, following: Iterator[str]) -> list[str]:
    """Return the lines of one command: Python, and empty ones for those by which it is continued."""
    command, empty = line, []
    while command.endswith("\\") and (further := next(following, None)) is not None:
        command = f"{command[:-1].rstrip()} {further.strip()}"
        empty.append("")
    found = _ESCAPED.match(command)
    if found is None:
        asked = _HELP.match(command)
        assert asked is not None
        return [asked["indent"] + _call("run_line_magic", "pinfo", asked["name"]), *empty]
    start, rest = found["indent"] + (found["target"] or ""), found["rest"].strip()
    name, _, argument = rest.partition(" ")
    argument = argument.strip()
    match found["escape"]:
        case "!" if not found["target"]:
            call = _call("system", rest)
        case "!" | "!!":
            call = _call("getoutput", rest)
        case "%" if name in _RUN_THEIR_BODY and argument:
            call = argument
        case "%":
            call = _call("run_line_magic", name, argument)
        case _:
            call = _call("run_line_magic", "pinfo", rest)
    return [start + call, *empty]


def _call(name: str, *arguments: str) -> str:
    return f"get_ipython().{name}({', '.join(map(repr, arguments))})"


def _may_begin_statement(before: Sequence[str]) -> bool:
    """Return whether a statement may begin after some lines: no string or bracket of theirs is open."""
    text = "".join(f"{line}\n" for line in before)
    try:
        for _ in tokenize.generate_tokens(io.StringIO(text).readline):
            pass
    except (tokenize.TokenError, SyntaxError):
        return False
    return True
