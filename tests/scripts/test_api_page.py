"""The page of published names is what the code says: a module publishes what its ``__all__`` names."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import api_page

import lowmem_ft


def test_the_page_is_up_to_date():
    page = api_page.PAGE.read_text(encoding="utf-8")
    assert api_page.with_table(page) == page, "run `python scripts/api_page.py`"


def test_every_published_name_exists_and_says_what_it_is():
    modules = api_page.published()
    assert importlib.import_module("lowmem_ft.techniques.streaming.parameter_streaming") in modules
    names = [(module, name) for module in modules for name in module.__all__]
    assert len(names) > 80
    assert [f"{module.__name__}.{name}" for module, name in names if not hasattr(module, name)] == []
    assert [
        f"{module.__name__}.{name}" for module, name in names if not api_page.summary(getattr(module, name))
    ] == []


def test_a_verb_that_enables_a_technique_is_published():
    techniques = Path(lowmem_ft.__file__).parent / "techniques"
    verbs = {
        verb
        for file in techniques.rglob("*.py")
        for verb in re.findall(r"^def (enable_\w+)", file.read_text(), re.M)
    }
    assert len(verbs) > 10
    assert verbs - {name for module in api_page.published() for name in module.__all__} == set()
