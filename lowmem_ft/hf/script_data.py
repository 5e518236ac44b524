"""A recipe's data as the rows that TRL's trainers take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowmem_ft.data.splits import num_held_out, open_split, sources_of
from lowmem_ft.errors import UserError
from lowmem_ft.recipe import Recipe


@dataclass(frozen=True)
class Rows:
    """Rows as they are in their files, of which TRL's trainers make tokens.

    Args:
        train: a ``datasets.Dataset``, or an ``IterableDataset`` with ``data.streaming``.
        evaluation: the held-out ones; None: there are none.
    """

    train: Any
    evaluation: Any = None


def load_rows(recipe: Recipe) -> Rows:
    """The rows that ``data.path`` and its like name, to pass to a trainer of TRL's; columns are not touched.

    Args:
        recipe: whose ``data.*`` keys say where rows lie, how many of them count, and which are held out.

    Returns:
        The rows.

    Raises:
        UserError: if the recipe names no data.
        DataError: if nothing is there, or it cannot be read.
    """
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
