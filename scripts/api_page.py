"""Write ``docs/python_api.md``: the modules that are published, and the first line of what each name says of itself.

    python scripts/api_page.py

Run it when a published name or its docstring has changed; a test compares.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import ModuleType

import marked_table
from command_line import rewrite_page

import lowmem_ft

PAGE = Path(__file__).parents[1] / "docs" / "python_api.md"


def with_table(page: str) -> str:
    """Return a page with the present list between its marks."""
    return marked_table.with_table(page, "api_page.py", "\n" + "\n".join(map(_section, published())))


def published() -> list[ModuleType]:
    """Return the modules that publish names: those with ``__all__``."""
    package = Path(lowmem_ft.__file__).parent
    files = [
        file for file in sorted(package.rglob("*.py")) if "\n__all__ = " in file.read_text(encoding="utf-8")
    ]
    paths = [file.relative_to(package.parent).with_suffix("") for file in files]
    return [importlib.import_module(".".join(path.parts).removesuffix(".__init__")) for path in paths]


def summary(value: object) -> str:
    """Return the first line of a value's own docstring, "" if it lacks one; the type of a value that can have none."""
    if not (inspect.ismodule(value) or inspect.isclass(value) or inspect.isroutine(value)):
        return f"A `{type(value).__name__}`."
    text = value.__doc__ or ""
    written_by_dataclass = inspect.isclass(value) and text.startswith(f"{value.__name__}(")
    return (
        "" if written_by_dataclass or not text else inspect.cleandoc(text).splitlines()[0].replace("|", "\\|")
    )


def _section(module: ModuleType) -> str:
    rows = "".join(f"| `{name}` | {summary(getattr(module, name))} |\n" for name in sorted(module.__all__))
    return f"## `{module.__name__}`\n\n{summary(module)}\n\n| name | |\n|---|---|\n{rows}"


if __name__ == "__main__":
    rewrite_page(__doc__, PAGE, with_table)
