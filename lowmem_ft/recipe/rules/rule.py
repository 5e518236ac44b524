"""A rule over a recipe, with the keys that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lowmem_ft.recipe.tree import Recipe

Check = Callable[[Recipe], "str | Iterable[str] | None"]
"""A function that returns what is wrong with a recipe: a sentence, several, or None."""


@dataclass(frozen=True)
class Conflict:
    """A rule across parts, and the keys it reads: it is skipped if one of them could not be read."""

    rule: Check
    keys: tuple[str, ...]

    def problems(self, recipe: Recipe) -> list[str]:
        """Return what is wrong with a recipe by this rule; may be empty."""
        found = self.rule(recipe)
        return [found] if isinstance(found, str) else list(found or ())


def reads(*keys: str) -> Callable[[Check], Conflict]:
    """Make a function a rule that reads these keys."""
    return lambda check: Conflict(rule=check, keys=keys)
