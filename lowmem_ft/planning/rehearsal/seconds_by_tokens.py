"""Step time by number of tokens: interpolates between traced shapes, for batches that were padded to a traced shape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np


class SecondsByTokens:
    """Seconds of traced shapes, as a piecewise linear function of their tokens.

    Args:
        traced: tokens, padding included, and seconds of each shape; at least one.
    """

    def __init__(self, traced: Iterable[tuple[int, float]]) -> None:
        seconds: defaultdict[int, list[float]] = defaultdict(list)
        for tokens, taken in traced:
            seconds[tokens].append(taken)
        self._tokens = np.array(sorted(seconds), dtype=np.float64)
        means = [float(np.mean(seconds[int(tokens)])) for tokens in self._tokens]
        self._seconds = np.maximum.accumulate(means)

    def share(self, tokens: int, *, of: int) -> float:
        """Return the share of a traced shape's seconds that this many tokens take.

        Args:
            tokens: no more than the shape has; fewer than the smallest traced shape count as that.
            of: tokens of the shape.
        """
        some, all_of_them = np.interp((tokens, of), self._tokens, self._seconds)
        return float(some / all_of_them) if all_of_them else 1.0

    @property
    def error(self) -> float:
        """Largest error of the line through all others at a shape between them, as a share of its seconds."""
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
