"""A rule over a recipe: a generator of sentences about what is wrong with it, and the keys that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lowmem_ft.recipe.tree import Recipe

Problems = Callable[[Recipe], Iterable[str]]


@dataclass(frozen=True)
class Rule:
    """A rule, and the keys that it reads: if one of them could not be read, the rule is skipped.

    Args:
        problems: yields what is wrong with a recipe: the rule, the value seen and the way out.
        keys: all keys that it reads; a group's name means all its keys.
    """

    problems: Problems
    keys: tuple[str, ...]

    def reads(self, key: str) -> bool:
        """Return whether its answer may change with a key."""
        return key in self.keys or key.partition(".")[0] in self.keys


def reads(*keys: str) -> Callable[[Problems], Rule]:
    """Make a function a rule that reads these keys."""
    return lambda problems: Rule(problems, keys)
