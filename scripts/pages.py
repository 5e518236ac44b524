"""Write what the code says of itself into pages of ``docs/``, between two marks in each.

    python scripts/pages.py                    # all of them
    python scripts/pages.py trainers support   # docs/trainers.md and docs/support.md
    python scripts/pages.py --check            # change nothing; exit code 1 if a page differs

Run it when a published name, a recipe key, a rule or a table of the package has changed, and after
``try_families.py --write``; a test compares.
"""

from __future__ import annotations

from pathlib import Path

from command_line import parser_of
from marked_table import with_table
from page_tables import coming_from, memory_ladder, python_api, recipe_keys, several_gpus, support, trainers

DOCS = Path(__file__).parents[1] / "docs"
TABLES = {
    "coming_from": coming_from.table,
    "memory_ladder": memory_ladder.table,
    "python_api": python_api.table,
    "recipe_keys": recipe_keys.table,
    "several_gpus": several_gpus.table,
    "support": support.table,
    "trainers": trainers.table,
}
"""For each page by name, the function that returns the lines between its marks."""


def main() -> int:
    """Write the pages that the arguments name, or check them."""
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all, {', '.join(TABLES)}")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a page differs")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in TABLES]:
        parser.error(f"NAME must be one of {', '.join(TABLES)}, got {', '.join(unknown)}")
    differs = False
    for name in options.names or TABLES:
        page = DOCS / f"{name}.md"
        text = page.read_text(encoding="utf-8")
        new = up_to_date(name, text)
        if text == new:
            continue
        differs = True
        if options.check:
            print(f"{page} differs: run `python scripts/pages.py {name}`")
        else:
            page.write_text(new, encoding="utf-8")
            print(f"wrote {page}")
    return int(options.check and differs)


def up_to_date(name: str, text: str) -> str:
    """Return a page's text with what the code says now.

    Args:
        name: the page's name.
        text: its present text.
    """
    return with_table(text, f"pages.py {name}", TABLES[name]())


if __name__ == "__main__":
    raise SystemExit(main())
