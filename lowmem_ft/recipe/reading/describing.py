"""A recipe as YAML with every default written out and every key explained; it loads to an equal recipe."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf

from lowmem_ft.recipe.reading.keys import RecipeKey, recipe_groups, recipe_keys
from lowmem_ft.recipe.reading.references import escape_references
from lowmem_ft.recipe.tree import Recipe

_WIDTH = 78
"""Characters of a comment, behind an indent of two: a terminal shows all of it."""


def recipe_to_yaml(recipe: Recipe) -> str:
    """Return the whole recipe as commented YAML; ``load_recipe`` of it gives an equal recipe.

    Args:
        recipe: any recipe.

    Returns:
        YAML text: each key under a comment that says what it does and, for a memory knob, frees and costs.
    """
    lines: list[str] = []
    group = ""
    for key in recipe_keys().values():
        this_group = key.path.rpartition(".")[0]
        if this_group != group:
            group = this_group
            lines += ["", *_comment(_first_line(recipe_groups()[group])), f"{group}:"]
        indent = "  " if group else ""
        value = getattr(getattr(recipe, group) if group else recipe, key.name)
        entry = _entry if isinstance(value, (list, tuple, dict)) else _entry_of_scalar
        block = [*_explanation(key), *entry(key.name, value)]
        lines += [f"{indent}{line}" for line in block]
    return "\n".join(lines) + "\n"


def _first_line(documented: type) -> str:
    return (documented.__doc__ or "").partition("\n")[0].replace("``", "`")


@functools.cache
def _explanation(key: RecipeKey) -> list[str]:
    choices = [f"One of: {', '.join(key.choices)}."] if key.choices else []
    lines = _comment(" ".join([key.help, *choices]))
    if key.frees:
        lines += _comment(f"Frees: {key.frees}")
    if key.costs:
        lines += _comment(f"Costs: {key.costs}")
    return lines


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent="# ",
        subsequent_indent="#   ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _entry(name: str, value: Any) -> list[str]:
    # OmegaConf writes what it reads: it quotes text such as 1e5 and no, which PyYAML alone would not.
    return OmegaConf.to_yaml(OmegaConf.create({name: escape_references(value)})).splitlines()


_entry_of_scalar: Callable[[str, Any], list[str]] = functools.lru_cache(maxsize=4096, typed=True)(_entry)
"""A run writes its recipe down as it starts; most keys have their default, whose entry is the same each time."""
