"""Write ``docs/python_api.md``: the modules that are published, and the first line of what each name says of itself.

    python scripts/api_page.py

Run it when a published name or its docstring has changed; a test compares.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import marked_table

PAGE = Path(__file__).parents[1] / "docs" / "python_api.md"

PUBLISHED = (
    "lowmem_ft",
    "lowmem_ft.hf",
    "lowmem_ft.virtual_gpu",
    "lowmem_ft.monitoring",
    "lowmem_ft.recipe",
    "lowmem_ft.estimator",
    "lowmem_ft.estimator.script",
    "lowmem_ft.planner",
    "lowmem_ft.rehearsal",
    "lowmem_ft.optimizers",
    "lowmem_ft.host",
    "lowmem_ft.foundation.errors",
)
"""Modules whose ``__all__`` is kept from one version to the next; those of techniques are found in their room."""


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_table(page: str) -> str:
    """Return a page with the present list between its marks."""
    modules = [importlib.import_module(name) for name in PUBLISHED]
    sections = [_section(module, module.__all__) for module in modules]
    sections += [_section(module, names) for module, names in technique_modules()]
    return marked_table.with_table(page, "api_page.py", "\n" + "\n".join(sections))


def technique_modules() -> Iterator[tuple[ModuleType, list[str]]]:
    """Yield each module of ``lowmem_ft.techniques`` that switches something on, and its verbs."""
    folder = Path(importlib.import_module("lowmem_ft.techniques").__path__[0])
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder.parents[1]).with_suffix("").parts
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
        verbs = [
            name
            for name, value in vars(module).items()
            if name.startswith("enable_")
            and inspect.isfunction(value)
            and value.__module__ == module.__name__
        ]
        if verbs:
            yield module, verbs


def _section(module: ModuleType, names: list[str]) -> str:
    rows = "".join(f"| `{name}` | {_first_line(getattr(module, name))} |\n" for name in sorted(names))
    return f"## `{module.__name__}`\n\n{_first_line(module)}\n\n| name | |\n|---|---|\n{rows}"


def _first_line(value: object) -> str:
    """Return the first line of a docstring; of a value that has none, its type."""
    is_documented = inspect.ismodule(value) or inspect.isclass(value) or inspect.isroutine(value)
    text = inspect.getdoc(value) if is_documented else f"A `{type(value).__name__}`."
    assert text, f"{value!r} has no docstring"
    return text.splitlines()[0].replace("|", "\\|")


if __name__ == "__main__":
    main()
