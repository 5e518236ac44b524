"""Rules across parts: what one key requires of another.

A new rule is a function in ``memory_rules.py``, ``run_rules.py``, ``engine_rules.py`` or ``context_rules.py``, marked
with the keys that it reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from lowmem_ft.foundation.errors import RecipeError, raise_problems
from lowmem_ft.recipe.reading.keys import accepts_none, recipe_groups, recipe_keys
from lowmem_ft.recipe.rules import context_rules, engine_rules, memory_rules, run_rules
from lowmem_ft.recipe.rules.rule import Rule
from lowmem_ft.recipe.tree import Recipe

LARGEST_WHOLE_NUMBER = 2**32 - 1
"""The largest whole number of any key: no run has more steps, examples, tokens or layers; larger ones overflow."""


def check_recipe(recipe: Recipe) -> None:
    """Refuse a recipe that cannot work, such as one put together in Python.

    Args:
        recipe: any recipe; ``load_recipe`` has checked its own already.

    Raises:
        RecipeError: if a value is out of its range or two values exclude each other; lists all problems.
    """
    raise_problems(recipe_problems(recipe), RecipeError)


def recipe_problems(recipe: Recipe, unreliable: Collection[str] = ()) -> list[str]:
    """Return what is wrong with a recipe: each part by its own rules, then the rules across parts.

    Args:
        recipe: any recipe.
        unreliable: dotted keys and groups that hold a stand-in for a value that could not be read: rules about them are
            skipped.

    Returns:
        One sentence per problem; empty if the recipe can work.
    """
    extreme = _extreme_numbers(recipe)
    problems = [*_empty_names(recipe), *_cut_texts(recipe), *extreme.values()]
    unreliable = {*unreliable, *extreme}
    for group in recipe_groups():
        own_rules: Callable[[], Iterable[str]] | None = getattr(getattr(recipe, group), "problems", None)
        if own_rules is not None:
            problems += [problem for problem in own_rules() if not _names_any(problem, unreliable)]
    for rule in CONFLICTS:
        involved = {*rule.keys, *(key.partition(".")[0] for key in rule.keys)}
        if involved.isdisjoint(unreliable):
            problems += rule.problems(recipe)
    return problems


CONFLICTS: tuple[Rule, ...] = tuple(
    rule
    for module in (run_rules, memory_rules, engine_rules, context_rules)
    for rule in vars(module).values()
    if isinstance(rule, Rule)
)
"""All rules across parts, in the order of the files."""


_NEEDED = ("model.name_or_path", "data.path")


def _empty_names(recipe: Recipe) -> list[str]:
    """Report empty text: ``data=`` would be the current folder; only a system prompt may be empty."""
    return [
        f"{path} is empty. Give it a value{'' if path in _NEEDED else f', or set {path}=null'}."
        for path, key in recipe_keys().items()
        if accepts_none(key.type_hint) and key.value_in(recipe) == "" and path != "data.system_prompt"
    ]


def _cut_texts(recipe: Recipe) -> list[str]:
    """Report text with the character NUL, at which the system ends each path."""
    return [
        f"{path} holds the character NUL, got {value!r}. Remove it."
        for path, key in recipe_keys().items()
        if isinstance(value := key.value_in(recipe), str) and "\0" in value
    ]


def _extreme_numbers(recipe: Recipe) -> dict[str, str]:
    """Return, by key, problems with numbers so extreme that no rule of a key's own has to consider them."""
    problems = {}
    for path, key in recipe_keys().items():
        for number in _numbers_in(key.value_in(recipe)):
            if isinstance(number, float) and not math.isfinite(number):
                problems[path] = f"{path} must be finite, got {number}."
            elif isinstance(number, int) and abs(number) > LARGEST_WHOLE_NUMBER:
                problems[path] = (
                    f"{path} must be a whole number of at most {LARGEST_WHOLE_NUMBER}, got {number}."
                )
    return problems


def _numbers_in(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        for entry in value:
            yield from _numbers_in(entry)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def _names_any(problem: str, unreliable: Collection[str]) -> bool:
    """Check whether a group's own rule mentions a stand-in, as one about an optimizer with a misspelt name does."""
    return any(re.search(rf"\b{re.escape(key)}\b", problem) for key in unreliable if "." in key)
