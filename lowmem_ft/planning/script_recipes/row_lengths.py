"""The length of the rows of a user's script, which decides more of a step's memory than anything else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from lowmem_ft.foundation.errors import UserError

MOST_ROWS_READ = 50_000
"""The most rows read of a data set; in a longer one these are evenly spread."""


def longest_row(datasets: Iterable[Any], collator: Any) -> int | None:
    """Return the tokens of the longest row that a trainer's data has, padding included; None: unknown before batches.

    Args:
        datasets: a trainer's data sets, tokenized; a mapping counts as the several data sets in it.
        collator: the collator that makes batches of them.
    """
    lengths = [
        _longest(one) for many in datasets for one in (many.values() if isinstance(many, Mapping) else [many])
    ]
    if not lengths or any(length is None for length in lengths):
        return None
    return padded(max(length for length in lengths if length is not None), collator)


def padded(length: int, collator: Any) -> int:
    """Return a length as the collator pads it."""
    multiple = getattr(collator, "pad_to_multiple_of", None) or 1
    return math.ceil(length / multiple) * multiple


def _longest(dataset: Any) -> int | None:
    """Return the longest length in tokens; None for a stream, or for rows that are not tokenized yet."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or len(dataset) == 0:
        return None
    if hasattr(dataset, "select_columns") and "input_ids" in (dataset.column_names or ()):
        dataset = dataset.select_columns(["input_ids"])
    step = math.ceil(len(dataset) / MOST_ROWS_READ)
    lengths = []
    for index in range(0, len(dataset), step):
        row = dataset[index]
        if not isinstance(row, Mapping) or "input_ids" not in row:
            return None
        lengths.append(len(row["input_ids"]))
    return max(lengths)


def row_length(said: int | None, found: int | None, *, packed: bool, collator: Any) -> int:
    """Return the tokens of a row in a recipe.

    Args:
        said: the longest that the arguments allow; None: they set no limit.
        found: the longest in the data; None: not known.
        packed: whether rows are filled.
        collator: the collator that pads them.

    Raises:
        UserError: if neither is known.
    """
    if said is not None and (packed or found is None):
        return padded(said, collator)
    if found is None:
        raise UserError(
            "A recipe needs a row length, and neither the arguments nor the data show it before batches are made. "
            "Pass it: hf.recipe_from(..., max_length=2048)."
        )
    return found if said is None else min(found, padded(said, collator))
