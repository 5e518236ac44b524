"""Write ``docs/recipe_keys.md``: every recipe key with its default, its values and what it does.

    python scripts/recipe_key_page.py

Run it when a key or its words have changed; a test compares. ``lowmem-ft recipes NAME`` prints the same words.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import marked_table
from command_line import rewrite_page

from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.reading.keys import SHORT_FORMS, RecipeKey, recipe_groups, recipe_keys

PAGE = Path(__file__).parents[1] / "docs" / "recipe_keys.md"


def with_table(page: str) -> str:
    """Return a page with the present keys between its marks."""
    return marked_table.with_table(page, Path(__file__).name, "\n".join(_lines(Recipe())) + "\n")


def _lines(recipe: Recipe) -> Iterator[str]:
    group = None
    for key in recipe_keys().values():
        this_group = key.path.rpartition(".")[0]
        if this_group != group:
            group = this_group
            about = (
                (recipe_groups()[group].__doc__ or "").partition("\n")[0].replace("``", "`") if group else ""
            )
            yield from ("", f"## {group or 'Of the recipe'}", "", *([about, ""] if about else []))
            yield from ("| key | default | what it does |", "|---|---|---|")
        yield f"| {_name(key)} | `{_default(key.value_in(recipe))}` | {_words(key)} |"


def _name(key: RecipeKey) -> str:
    short = next((short for short, path in SHORT_FORMS.items() if path == key.path), None)
    return f"`{key.path}`" if short is None else f"`{key.path}`, in short `{short}`"


def _default(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_default, value))}]"
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) or '""'


def _words(key: RecipeKey) -> str:
    parts = [key.help]
    if key.choices:
        parts.append(f"One of: {', '.join(f'`{choice}`' for choice in key.choices)}.")
    parts += [
        f"*{title}:* {words}." for title, words in (("Frees", key.frees), ("Costs", key.costs)) if words
    ]
    return " ".join(parts).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    rewrite_page(__doc__, PAGE, with_table)
