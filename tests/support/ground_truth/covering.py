"""Few runs in which any two choices of different factors meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping

from measuring.cpu_matrix import Choice, Levels

Factors = Mapping[str, Mapping[str, Choice]]
IsPossible = Callable[[Levels], bool]


def covering(factors: Factors, is_possible: IsPossible) -> tuple[list[Levels], list[Levels]]:
    """Return runs in which any two compatible choices meet at least once.

    Args:
        factors: choices of each factor.
        is_possible: whether some choices, or all, are compatible.

    Returns:
        The runs, and the pairs for which no run was found.
    """
    generator = random.Random(0)
    items = [(factor, choice) for factor, choices in factors.items() for choice in choices]
    missing = {frozenset(pair) for pair in itertools.combinations(items, 2) if pair[0][0] != pair[1][0]}
    runs: list[Levels] = []
    excluded: list[Levels] = []
    while missing:
        pair = min(missing, key=sorted)
        tries = (_completed(dict(pair), factors, is_possible, generator) for _ in range(60))
        candidates = [found for found in tries if found is not None]
        if not candidates:
            excluded.append(dict(pair))
            missing.discard(pair)
            continue
        best = max(candidates, key=lambda levels: len(missing & _pairs_of(levels)))
        missing -= _pairs_of(best)
        runs.append({factor: best[factor] for factor in factors})
    return runs, excluded


def _completed(
    levels: dict[str, str], factors: Factors, is_possible: IsPossible, generator: random.Random
) -> dict[str, str] | None:
    """Fill in the other factors at random, in a random order; None at a dead end."""
    for factor in generator.sample(list(factors), len(factors)):
        if factor not in levels:
            allowed = [choice for choice in factors[factor] if is_possible({**levels, factor: choice})]
            if not allowed:
                return None
            levels[factor] = generator.choice(allowed)
    return levels if is_possible(levels) else None


def _pairs_of(levels: Levels) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(pair) for pair in itertools.combinations(levels.items(), 2)}
