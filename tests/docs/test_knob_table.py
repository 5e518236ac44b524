"""The table of memory knobs in the documentation is what the knobs say."""

from __future__ import annotations

from knob_table import PAGE, with_table

WAY_OUT = f"{PAGE.name} does not have the present table: run `python scripts/knob_table.py`"


def test_the_page_has_the_present_table():
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, WAY_OUT
