"""``lowmem-ft docs``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lowmem_ft.cli import main

DOCS = Path(__file__).parents[3] / "docs"


def test_it_lists_each_page_with_its_title(capsys):
    assert main(["docs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(page.stem for page in DOCS.glob("*.md"))
    assert "proof                     Predicted against measured" in lines  # below a comment


@pytest.mark.parametrize("name", ["qlora", "qlora.md", "docs/qlora.md", "qlora.md#packed"])
def test_a_pipe_gets_a_page_as_it_is(capsys, name):
    assert main(["docs", name]) == 0
    assert capsys.readouterr().out == (DOCS / "qlora.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(page.stem for page in DOCS.glob("*.md")))
def test_a_terminal_of_80_columns_gets_prose_that_fits_and_code_that_is_whole(capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["docs", name]) == 0
    prose, code = [], []
    for number, part in enumerate(capsys.readouterr().out.split("```")):
        (code if number % 2 else prose).extend(line.rstrip() for line in part.splitlines())
    whole = {line.rstrip() for line in (DOCS / f"{name}.md").read_text(encoding="utf-8").splitlines()}
    assert [line for line in code if line.strip() and line not in whole and f"```{line}" not in whole] == []
    assert [line for line in prose if len(line) > 80 and len(line.split()) > 2] == []


def test_an_unknown_page_is_told_with_those_that_are_near(capsys):
    assert main(["docs", "out-of-memory"]) == 2
    assert capsys.readouterr().err == (
        "error: There is no page 'out-of-memory'. Did you mean `out_of_memory`? `lowmem-ft docs` lists all "
        f"{len([*DOCS.glob('*.md')])}.\n"
    )
