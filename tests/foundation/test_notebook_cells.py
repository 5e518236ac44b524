"""Cells of notebooks, as Python."""

from __future__ import annotations

import json

import pytest

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.notebook_cells import read_cells

TRANSLATED = {
    "a command": ("!pip install trl\nx = 1", "get_ipython().system('pip install trl')\nx = 1"),
    "in a block": ("if a:\n    !ls\nelse:\n    b", "if a:\n    get_ipython().system('ls')\nelse:\n    b"),
    "continued": ("!pip install a \\\n  b\nx", "get_ipython().system('pip install a b')\n\nx"),
    "assigned": ("a, b = !ls -l", "a, b = get_ipython().getoutput('ls -l')"),
    "for its output": ("!!ls", "get_ipython().getoutput('ls')"),
    "a magic": ("%env A=B", "get_ipython().run_line_magic('env', 'A=B')"),
    "a magic's value": ("a = %env HOME", "a = get_ipython().run_line_magic('env', 'HOME')"),
    "timed": ("x = %time f(1,\n  2)", "x = f(1,\n  2)"),
    "a timed cell": ("# Now\n%%time\nx = 1", "# Now\n\nx = 1"),
    "captured": (
        "%%capture out\n%time f()\n!ls",
        "\nf()\nget_ipython().system('ls')\nout = get_ipython().captured()",
    ),
    "a cell of another language": (
        "%%bash -e\nls\ncd",
        "get_ipython().run_cell_magic('bash', '-e', 'ls\\ncd')",
    ),
    "help": (
        "a.b?\n??c",
        "\n".join(f"get_ipython().run_line_magic('pinfo', '{name}')" for name in ("a.b", "c")),
    ),
    "without an escape": ("pip install trl", "get_ipython().run_line_magic('pip', 'install trl')"),
}
STAYS = (
    "s = '''\n!ls\n'''",
    "x = (a\n  % b)",
    "x = a \\\n  % b",
    "x %= 2",
    "# what?",
    "pip = 2",
    "a != b",
    "ls = [\n 1]",
)


def notebook_of(*cells: dict, **others: object) -> str:
    return json.dumps({"nbformat": 4, "metadata": {}, "cells": cells, **others})


def code(source: object) -> dict[str, object]:
    return {"cell_type": "code", "source": source, "outputs": [{"text": "1 / 0"}]}


@pytest.mark.parametrize("source, python", TRANSLATED.values(), ids=TRANSLATED.keys())
def test_what_is_not_python_becomes_a_call_where_it_stands(tmp_path, source, python):
    (tmp_path / "a.ipynb").write_text(notebook_of(code(source)))
    assert [cell.code for cell in read_cells(tmp_path / "a.ipynb", "a.ipynb")] == [python]


@pytest.mark.parametrize("source", STAYS)
def test_python_stays(tmp_path, source):
    (tmp_path / "a.ipynb").write_text(notebook_of(code(source)))
    assert [cell.code for cell in read_cells(tmp_path / "a.ipynb", "a.ipynb")] == [source]


def test_cells_of_code_are_numbered_as_a_kernel_that_runs_them(tmp_path):
    text = {"cell_type": "markdown", "source": "# Text"}
    (tmp_path / "a.ipynb").write_text(
        notebook_of(text, code(["a = 1\n", "b"]), code(" \n"), text, code("c\r\nd"))
    )
    cells = read_cells(tmp_path / "a.ipynb", "a.ipynb")
    assert [(cell.number, cell.code) for cell in cells] == [(1, "a = 1\nb"), (2, "c\nd")]


REFUSED = {
    "no JSON": ('{"cells":\n ]', "JSON, but a.ipynb is not in line 2"),
    "no text": ("\x00\xff", "is not"),
    "other JSON": ("[1]", "a list of cells, but a.ipynb has none"),
    "no code": (notebook_of({"cell_type": "markdown", "source": "x"}), "a.ipynb has no code cell"),
    "an old format": (json.dumps({"nbformat": 3, "worksheets": []}), "--nbformat 4 a.ipynb"),
    "R": (notebook_of(code("x"), metadata={"kernelspec": {"name": "ir"}}), "a.ipynb in R"),
    "Julia": (notebook_of(code("x"), metadata={"language_info": {"name": "julia"}}), "a.ipynb in julia"),
}


@pytest.mark.parametrize("text, words", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_notebook_in_python_is_refused(tmp_path, text, words):
    (tmp_path / "a.ipynb").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=words):
        read_cells(tmp_path / "a.ipynb", "a.ipynb")
