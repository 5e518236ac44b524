"""The keys of other toolkits and ours, from the table that answers a wrong key."""

from __future__ import annotations

from lowmem_ft.recipe.reading.foreign_keys import FOREIGN_KEYS, KEYS_OF, ForeignKey


def table() -> str:
    """Return a table for each toolkit."""
    tables = []
    for toolkit, names in KEYS_OF.items():
        rows = "".join(_row(FOREIGN_KEYS[name]) for name in names)
        tables.append(f"## {toolkit}\n\n| key | in a recipe |\n|---|---|\n{rows}")
    return "\n".join(tables)


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
