"""The table of what each trainer allows, from the rows that ``hf.attach`` itself reads."""

from __future__ import annotations

from collections.abc import Iterator

from lowmem_ft.recipe.trainers.trainer_kinds import KINDS, ROWS, Refused, Row, Verdict


def table() -> str:
    """Return the table."""
    header = f"| recipe key | {' | '.join(KINDS)} |\n|{'---|' * (len(KINDS) + 1)}\n"
    return header + "".join(map(_row, ROWS))


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
