"""Overrides that a user gave for a recipe's fields as its arguments were made, kept with these for ``hf.attach``.

A recipe and arguments that differ may be a mistake in either. An override given by name is neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lowmem_ft.hf.trainers.key_table import IN_TRAINER
from lowmem_ft.recipe import Recipe

_KEPT = "_lowmem_ft_said"
"""Name of the arguments' attribute; its values are plain, as a trainer pickles its arguments into every checkpoint."""


def keep_overrides(args: Any, recipe: Recipe, names: Iterable[str]) -> None:
    """Record with the arguments which of a recipe's keys were overridden.

    Args:
        args: the arguments made from the recipe and the overrides.
        recipe: the recipe.
        names: names of the fields that were given.
    """
    fields_by_key = {path: place.fields(recipe) for path, place in IN_TRAINER.items()}
    kept = {
        path: {name: (plain(own), plain(getattr(args, name, None))) for name, own in fields.items()}
        for path, fields in fields_by_key.items()
        if fields.keys() & set(names)
    }
    setattr(args, _KEPT, kept)


def overridden_keys(args: Any, recipe: Recipe) -> frozenset[str]:
    """Return the keys on which arguments differ from a recipe because a user overrode them.

    Args:
        args: a trainer's arguments, however they were made.
        recipe: the recipe; a key counts if recipe and arguments still have the values that they had at the override.
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
    """Return an enum of transformers as its text, and None as False, as HF's flags treat them alike."""
    value = getattr(value, "value", value)
    return False if value is None else value
