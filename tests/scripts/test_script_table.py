"""The page of measured scripts has every row, and no row is further off than it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from marked_table import cells_of
from script_table import PAGE
from user_scripts.measured import PEAK, measure
from user_scripts.models import write_all
from user_scripts.rows import ROWS


def test_rows_have_names_of_their_own_and_scripts_that_are_there():
    assert len({row.name for row in ROWS}) == len(ROWS) >= 45
    assert all(row.script.is_file() for row in ROWS)


def test_the_page_has_every_row_within_its_bounds():
    cells = cells_of(PAGE.read_text(encoding="utf-8"), "script_table.py")
    written = {tuple(row[:3]): row[3:] for row in cells}
    assert list(written) == [(row.trainer, row.kind, row.adapter) for row in ROWS]
    for row in ROWS:
        _, _, whole, _, worst = written[row.trainer, row.kind, row.adapter]
        assert abs(float(whole.strip("%"))) <= 100 * PEAK, row.name
        assert abs(float(worst.strip("%"))) <= 100 * row.off, row.name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("user")
    write_all(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_script_takes_what_its_estimate_says(row, folder: Path, monkeypatch):
    if not row.is_runnable:
        pytest.skip(f"needs the package {row.package}")
    monkeypatch.chdir(folder)
    seen = measure(row)
    assert seen.keeps_its_word, seen
