"""The page of published names is what the code says."""

from __future__ import annotations

import api_page


def test_the_page_is_up_to_date():
    page = api_page.PAGE.read_text(encoding="utf-8")
    assert api_page.with_table(page) == page, "run `python scripts/api_page.py`"


def test_it_lists_what_the_docs_import():
    page = api_page.PAGE.read_text(encoding="utf-8")
    assert "| `estimate_memory` |" in page
    assert "## `lowmem_ft.techniques.streaming.parameter_streaming`" in page
