"""Seconds of data that was padded up to a shape: between those of the traced shapes with fewer and with more tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np


class SecondsByTokens:
    """What traced shapes take, as a line through them.

    Args:
        traced: tokens, padding included, and seconds of each; at least one.
    """

    def __init__(self, traced: Iterable[tuple[int, float]]) -> None:
        seconds: defaultdict[int, list[float]] = defaultdict(list)
        for tokens, taken in traced:
            seconds[tokens].append(taken)
        self._tokens = np.array(sorted(seconds), dtype=np.float64)
        means = [float(np.mean(seconds[int(tokens)])) for tokens in self._tokens]
        self._seconds = np.maximum.accumulate(means)

    def share(self, tokens: int, *, of: int) -> float:
        """Which share of a traced shape's seconds so many tokens take.

        Args:
            tokens: no more than the shape has; fewer than any has count as the fewest.
            of: the shape's.
        """
        some, all_of_them = np.interp((tokens, of), self._tokens, self._seconds)
        return float(some / all_of_them) if all_of_them else 1.0

    @property
    def error(self) -> float:
        """The most by which the line through the others misses a shape between them, as a share of its seconds."""
        others = [np.delete(np.arange(len(self._tokens)), index) for index in range(1, len(self._tokens) - 1)]
        missed = [
            abs(
                np.interp(self._tokens[index], self._tokens[rest], self._seconds[rest]) / self._seconds[index]
                - 1
            )
            for index, rest in enumerate(others, start=1)
            if self._seconds[index]
        ]
        return float(max(missed, default=0.0))
