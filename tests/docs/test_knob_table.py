"""The table of memory knobs in the documentation is what the knobs say."""

from __future__ import annotations

from knob_table import PAGE, with_table

from lowmem_ft.recipe.reading.keys import recipe_keys

WAY_OUT = f"{PAGE.name} does not have the present table: run `python scripts/knob_table.py`"


def test_the_page_has_the_present_table():
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, WAY_OUT


def test_each_memory_knob_is_a_row_with_what_it_frees_and_costs():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    for key in recipe_keys().values():
        found = [row for row in rows if row.startswith(f"| `{key.path}` |")]
        assert len(found) == (key.effects is not None), f"{key.path}: {WAY_OUT}"
        for row in found:
            assert row.count("|") == 5
            assert all(text in row for text in (key.frees, key.costs) if text), f"{key.path}: {WAY_OUT}"
