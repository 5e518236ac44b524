"""A recipe's data as the rows that TRL's trainers take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowmem_ft.data.mixing import concatenated, mixed
from lowmem_ft.data.sources.listed import listed_sources
from lowmem_ft.data.sources.splits import held_out_parts, num_held_out, training_parts
from lowmem_ft.data.text.other_kinds import are_preferences, holds_preferences, judged_answers
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
    """Return the rows that ``data.path`` or ``data.sources`` name, to pass to TRL's trainers; columns are unchanged.

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
    if preferences is not None and {"chosen_ids", "rejected_ids"} <= set(columns):
        raise DataError(
            f"{_named(recipe)} holds preferences that are tokens already (chosen_ids, rejected_ids), which TRL's "
            "RewardTrainer alone takes. Leave preferences= out for it; for others, write chosen and rejected as text."
        )
    if preferences is not None and columns and are_preferences(columns) != preferences:
        raise DataError(_other_kind(columns, _named(recipe), wanted=preferences))
    if preferences is False and (problem := judged_answers(next(iter(rows.train), {}))):
        raise DataError(f"{_named(recipe)}: {problem}")
    return rows


def _named(recipe: Recipe) -> str:
    return ", ".join(one.path for one in listed_sources(recipe.data))


def _opened(recipe: Recipe) -> Rows:
    data, seed = recipe.data, recipe.training.seed
    if not data.is_named:
        raise UserError("data.path must name the training data, got null. Set data=FILE, or a hub dataset.")
    parts, held_out = training_parts(data), [part.open() for part in held_out_parts(data)]
    rows = [part.open() for part in parts]
    if data.eval_size is not None:
        halves = [one.train_test_split(num_held_out(data.eval_size, len(one)), seed=seed) for one in rows]
        rows, held_out = [half["train"] for half in halves], [half["test"] for half in halves]
    if len(rows) == 1:
        return Rows(*rows, *held_out)
    if data.streaming:
        raise DataError(
            "hf.load_rows streams one source, got several. Set data.streaming=false, or name one source."
        )
    listed = [part.listed for part in parts]
    train, _ = mixed(rows, listed, seed=seed, stopping_strategy=data.stopping_strategy)
    return Rows(train, concatenated(held_out, listed) if held_out else None)


def _other_kind(columns: Sequence[str], source: str, *, wanted: bool) -> str:
    if not wanted:
        return holds_preferences(columns, source)
    return (
        f"Preferences have a column `chosen` and one `rejected`, and {source} has {', '.join(columns)}. Rename the "
        "columns, or learn only answers, with TRL's SFTTrainer."
    )
