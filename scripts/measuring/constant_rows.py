"""Measurements on rows of constant tokens, as earlier versions made them: tables say so in their first sentence.

A measurement on random rows has them in its field ``rows`` (``measured_rows.py``). The sentences go by themselves with
the last measurement that has no such field.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CUDA_ROWS = Path(__file__).resolve().parents[2] / "tests" / "data" / "measured" / "measured-cuda.json"
"""The runs of recipes to which the clock's numbers for their GPUs are fitted."""

CONSTANT = "constant"
"""Kind of rows of measurements that do not tell theirs."""

FASTER = "on which a GPU multiplies at a higher clock than on real data"

OF_RECIPES = (
    f"**The seconds of recipes are those of constant tokens**, {FASTER}, in four documents of 512 a packed row; they "
    "are provisional until measured again on random ones. Memory does not depend on tokens."
)
OF_COMPARISONS = (
    f"**All of these ran on constant tokens**, {FASTER}: ours on token 1 in four documents of 512 a row, the other "
    "tools on tokens 2 to 2049 in one document, whose attention is four times the work, with Liger's head in chunks of "
    "128 tokens. No ratio of ours to theirs stands until both are measured again on the same random rows."
)
OF_THE_CLOCK = (
    f"**The clock of an H100 and an H200 is fitted to runs on constant tokens**, {FASTER}; their seconds and tokens/s "
    "are provisional until those runs are measured again."
)


def kind_of_rows(measurement: Mapping[str, Any]) -> str:
    """Return on what kind of rows a stored measurement was made: numbers of two kinds are not compared."""
    rows = measurement.get("rows")
    return CONSTANT if rows is None else f"{rows['tokens']} {rows['documents']}"


def caveat_of(measurements: Iterable[Mapping[str, Any]], sentence: str) -> list[str]:
    """Return the lines that begin a table of measurements: the sentence, if one was made on constant tokens."""
    if all(kind_of_rows(one) != CONSTANT for one in measurements):
        return []
    return [*textwrap.wrap(sentence, 120), ""]


def caveat_of_recipes(sentence: str = OF_RECIPES) -> list[str]:
    """Return the lines that begin a table with seconds of recipes on a GPU, or by the clock that is fitted to them."""
    rows = json.loads(CUDA_ROWS.read_text(encoding="utf-8"))
    return caveat_of((row for row in rows if "seconds" in row["measured"]), sentence)


def caveat_of_the_clock() -> list[str]:
    """Return the lines that begin a table of seconds by the clock for GPUs that it is fitted to."""
    return caveat_of_recipes(OF_THE_CLOCK)
