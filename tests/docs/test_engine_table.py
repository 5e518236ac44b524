"""The table of engines in the documentation is what the recipe's rules say, and what it names as proof is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_table import PAGE, ROWS, TESTS, TRACE, is_for_want_of_proof, with_table
from trained_by_processes import CASES

from lowmem_ft.foundation.knob import ENGINES

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_present_table():
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, (
        f"{PAGE.name} is older than the rules or the tests: run `python scripts/engine_table.py`"
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_named_as_proof_is_there(engine):
    source = (ROOT / TESTS[engine]).read_text(encoding="utf-8")
    assert TESTS[engine] in PAGE.read_text(encoding="utf-8")
    for row in ROWS:
        proof = row.proofs.get(engine, TRACE)
        if proof != TRACE:
            assert "OF_ENGINES[" in source
            assert f'"{engine}"' in source
            settings = CASES[engine][proof][0].split()
            ours = [word for word in row.settings.split() if not _is_of_every_case(word)]
            assert set(ours) <= set(settings), f"{proof} does not show {row.name}"


def _is_of_every_case(setting):
    """The recipe that all cases go by says so itself."""
    return setting in ("checkpointing.mode=full", "loss.chunk_tokens=64")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_shows_nothing_with_an_engine_that_refuses_it_and_says_why(row):
    refusals = {engine: said for engine in ENGINES if (said := row.refusal(engine)) is not None}
    assert not refusals.keys() & row.proofs.keys()
    assert bool(row.why) == any(not is_for_want_of_proof(said) for said in refusals.values())
