"""A recipe's data as the rows that TRL's trainers take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowmem_ft.data.sources.splits import num_held_out, open_split, sources_of
from lowmem_ft.data.text.formats import are_preferences, holds_preferences, judged_answers
from lowmem_ft.foundation.errors import DataError, UserError
from lowmem_ft.recipe import Recipe


@dataclass(frozen=True)
class Rows:
    """Rows as they are in their files, which TRL's trainers tokenize.

    Args:
        train: a ``datasets.Dataset``, or an ``IterableDataset`` with ``data.streaming``.
        evaluation: the held-out rows; None: there are no such rows.
    """

    train: Any
    evaluation: Any = None


def load_rows(recipe: Recipe, *, preferences: bool | None = None) -> Rows:
    """Return the rows that ``data.path`` and its like name, to pass to one of TRL's trainers; columns are unchanged.

    Args:
        recipe: its ``data.*`` keys name the rows, how many of them count, and which are held out.
        preferences: True: rows have to be pairs of answers, as for DPO; False: neither those nor judged answers, as
            for KTO; None: any.

    Returns:
        The rows.

    Raises:
        UserError: if the recipe names no data.
        DataError: if nothing is there, it cannot be read, or it is of the other kind.
    """
    rows = _opened(recipe)
    columns = rows.train.column_names or []  # a stream may not know them
    if preferences is not None and columns and are_preferences(columns) != preferences:
        raise DataError(_other_kind(columns, str(recipe.data.path), wanted=preferences))
    if preferences is False and (problem := judged_answers(next(iter(rows.train), {}))):
        raise DataError(f"{recipe.data.path}: {problem}")
    return rows


def _opened(recipe: Recipe) -> Rows:
    if recipe.data.path is None:
        raise UserError("data.path must name the training data, got null. Set data=FILE, or a hub dataset.")
    source, held_out = sources_of(recipe.data)
    train = open_split(recipe.data, source, is_train=True)
    if held_out is not None:
        return Rows(train, open_split(recipe.data, held_out, is_train=False))
    if recipe.data.eval_size is None:
        return Rows(train)
    parts = train.train_test_split(num_held_out(recipe.data.eval_size, len(train)), seed=recipe.training.seed)
    return Rows(parts["train"], parts["test"])


def _other_kind(columns: Sequence[str], source: str, *, wanted: bool) -> str:
    if not wanted:
        return holds_preferences(columns, source)
    return (
        f"Preferences have a column `chosen` and one `rejected`, and {source} has {', '.join(columns)}. Rename the "
        "columns, or learn only answers, with TRL's SFTTrainer."
    )
