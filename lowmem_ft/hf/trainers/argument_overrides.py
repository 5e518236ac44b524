"""What somebody has said over a recipe, field by field, as its arguments were made: kept with them for ``hf.attach``.

A recipe and arguments that differ may be a mistake in either. An override given by name is neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lowmem_ft.hf.trainers.key_table import IN_TRAINER
from lowmem_ft.recipe import Recipe

_KEPT = "_lowmem_ft_said"
"""The attribute of arguments; plain values, as a trainer pickles its arguments into every checkpoint."""


def keep_overrides(args: Any, recipe: Recipe, names: Iterable[str]) -> None:
    """Note with arguments which of a recipe's keys were overridden.

    Args:
        args: made from the recipe and the overrides.
        recipe: likewise.
        names: of the fields that were given.
    """
    fields_by_key = {path: place.fields(recipe) for path, place in IN_TRAINER.items()}
    kept = {
        path: {name: (plain(own), plain(getattr(args, name, None))) for name, own in fields.items()}
        for path, fields in fields_by_key.items()
        if fields.keys() & set(names)
    }
    setattr(args, _KEPT, kept)


def overridden_keys(args: Any, recipe: Recipe) -> frozenset[str]:
    """The keys on which arguments differ from a recipe because somebody has said so.

    Args:
        args: a trainer's; made by anybody.
        recipe: of which a key must say what it said as they were made, and the arguments what the override did.
    """
    return frozenset(
        path
        for path, fields in getattr(args, _KEPT, {}).items()
        if fields
        == {
            name: (plain(own), plain(getattr(args, name, None)))
            for name, own in IN_TRAINER[path].fields(recipe).items()
        }
    )


def plain(value: Any) -> Any:
    """An enum of transformers as its text; None and False alike, as HF's flags have them."""
    value = getattr(value, "value", value)
    return False if value is None else value
