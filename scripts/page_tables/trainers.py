"""The table of what each trainer allows, from the rows that ``hf.attach`` itself reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lowmem_ft.recipe.trainers.trainer_kinds import KINDS, ROWS, Kind, Refused, Row, Verdict


def table() -> str:
    """Return the table."""
    kinds = alike()
    header = f"| recipe key | {' | '.join(kinds)} |\n|{'---|' * (len(kinds) + 1)}\n"
    return header + "".join(_row(row, kinds.values()) for row in ROWS)


def alike() -> dict[str, Kind]:
    """Return one of each set of trainers that allow the same, by the names of all in the set."""
    sets: dict[tuple[Verdict, ...], list[Kind]] = {}
    for kind in KINDS:
        sets.setdefault(tuple(row.verdict(kind) for row in ROWS), []).append(kind)
    return {", ".join(kinds): kinds[0] for kinds in sets.values()}


def _row(row: Row, kinds: Iterable[Kind]) -> str:
    cells = (_cell(row.verdict(kind)) for kind in kinds)
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
