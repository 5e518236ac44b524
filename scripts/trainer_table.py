"""Write a table of what each trainer allows into ``docs/trainers.md``, from the table that ``hf.attach`` itself reads.

    python scripts/trainer_table.py

Run it when that table has changed; a test compares page and table.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import marked_table
from command_line import rewrite_page

from lowmem_ft.hf.trainers.trainer_kinds import KINDS, ROWS, Refused, Row, Verdict

PAGE = Path(__file__).parents[1] / "docs" / "trainers.md"


def with_table(page: str) -> str:
    """Return a page with the current table between its marks."""
    header = f"| recipe key | {' | '.join(KINDS)} |\n|{'---|' * (len(KINDS) + 1)}\n"
    return marked_table.with_table(page, "trainer_table.py", header + "".join(map(_row, ROWS)))


def _row(row: Row) -> str:
    cells = (_cell(row.verdict(kind)) for kind in KINDS)
    return f"| `{row.key}` | {' | '.join(cells)} |\n"


def _cell(verdict: Verdict) -> str:
    return "; ".join(_words(verdict))


def _words(verdict: Verdict) -> Iterator[str]:
    if isinstance(verdict, Refused):
        yield f"refused: {verdict.because}"
        return
    yield f"yes: {verdict.note}" if verdict.note else "yes"
    if verdict.costs:
        yield verdict.costs


if __name__ == "__main__":
    rewrite_page(__doc__, PAGE, with_table)
