"""The tables of other toolkits' keys in the documentation are those that answer a wrong key."""

from __future__ import annotations

from foreign_key_table import PAGE, with_table


def test_the_page_has_the_present_tables():
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, (
        f"{PAGE.name} is older than its tables: run `python scripts/foreign_key_table.py`"
    )
