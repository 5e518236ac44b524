"""Write the keys of other toolkits and ours into ``docs/coming_from.md``, from the table that answers a wrong key.

    python scripts/foreign_key_table.py

Run it when that table has changed; a test compares page and table.
"""

from __future__ import annotations

from pathlib import Path

import marked_table
from command_line import rewrite_page

from lowmem_ft.recipe.reading.foreign_keys import FOREIGN_KEYS, KEYS_OF, ForeignKey

PAGE = Path(__file__).parents[1] / "docs" / "coming_from.md"


def with_table(page: str) -> str:
    """Return a page with the current tables, one a toolkit, between its marks."""
    tables = []
    for toolkit, names in KEYS_OF.items():
        rows = "".join(_row(FOREIGN_KEYS[name]) for name in names)
        tables.append(f"## {toolkit}\n\n| key | in a recipe |\n|---|---|\n{rows}")
    return marked_table.with_table(page, "foreign_key_table.py", "\n".join(tables))


def _row(key: ForeignKey) -> str:
    by_setting: dict[str, list[str]] = {}
    for value, setting in key.values.items():
        by_setting.setdefault(f"`{setting}`" if setting else "leave it out", []).append(f"`{value}`")
    values = "; ".join(f"{', '.join(values)}: {setting}" for setting, values in by_setting.items())
    parts = (
        f"`{key.ours}`." if key.ours else "",
        key.note,
        f"{values[:1].upper()}{values[1:]}." if values else "",
    )
    return f"| `{key.name}` | {' '.join(filter(None, parts))} |\n"


if __name__ == "__main__":
    rewrite_page(__doc__, PAGE, with_table)
