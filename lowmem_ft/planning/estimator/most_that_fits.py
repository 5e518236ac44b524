"""The largest number of anything that fits: layers that keep their activations, tokens of a row.

More of it never takes less memory. The first may cost nothing, as the peak is elsewhere, and each of the last ones
costs most: a line through two numbers is above the bytes between them and below those beyond. So linear interpolation
never overestimates the number at which memory ends, and linear extrapolation never underestimates it.

A line leads nowhere where an allocator takes memory in large steps, or where a number does not fit for another reason
than bytes. Then the search halves what is left between the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

MOST_BY_LINES = 9
"""Estimates after which what is left between two numbers is halved."""

MOST_ESTIMATES = 16
"""Estimates after which a search ends with the largest number that was found to fit."""

FARTHEST = 8
"""Multiple of a number that fits beyond which a line through smaller ones is not believed, if a share is enough."""


class Answer(Protocol):
    """An estimate."""

    @property
    def fits(self) -> bool:
        """True if there is enough memory, and nothing else prevents the run."""
        ...


AnswerT = TypeVar("AnswerT", bound=Answer)


class MostThatFits(Generic[AnswerT]):
    """Search for the largest number that fits; each number is estimated once.

    Args:
        estimate: estimates a number.
        room_of: returns the bytes that an estimate leaves of the memory, less than 0 if some lack.
        numbers: the smallest and the largest number.
        begin: returns where memory should end, by what is known: nothing yet, or one number and the room it left.
        resolution: share of the number to which two estimates bracket the end; 0: the end is found exactly, and
            nothing beyond it is estimated where extrapolation rules that out.

    Attributes:
        answers: the estimates by their numbers, in the order in which they were made.
    """

    def __init__(
        self,
        estimate: Callable[[int], AnswerT],
        room_of: Callable[[AnswerT], float],
        numbers: tuple[int, int],
        begin: Callable[[tuple[int, float] | None], float],
        resolution: float = 0.0,
    ) -> None:
        self._estimate, self._room_of, self._begin = estimate, room_of, begin
        self._least, self._most = numbers
        self._resolution = resolution
        self.answers: dict[int, AnswerT] = {}

    def find(self) -> int | None:
        """Return the largest number that fits, or None."""
        while len(self.answers) < MOST_ESTIMATES and (number := self._next()) is not None:
            self.answers[number] = self._estimate(number)
        return max(self.fitting, default=None)

    @property
    def fitting(self) -> list[int]:
        """The numbers that were estimated to fit, smallest first."""
        return sorted(number for number, answer in self.answers.items() if answer.fits)

    @property
    def beyond(self) -> list[int]:
        """The numbers that were estimated not to fit, smallest first."""
        return sorted(self.answers.keys() - self.fitting)

    def _next(self) -> int | None:
        """Return the number to estimate next; None once the largest that fits is known."""
        fitting, beyond = self.fitting, self.beyond
        fits = fitting[-1] if fitting else self._least - 1
        end = min(beyond, default=self._most + 1)
        step = max(1, math.floor(self._resolution * fits))
        if end - fits <= step:
            return None
        if not self._resolution and len(fitting) > 1 and self._end_of_room(*fitting[-2:]) < fits + 1:
            return None
        guess = self._guess(fitting, beyond, end)
        if self._resolution and fitting and not beyond:
            guess = min(guess, FARTHEST * fits)
        return math.floor(min(max(guess, fits + step), end - step))

    def _guess(self, fitting: list[int], beyond: list[int], end: int) -> float:
        """Return where memory should end, by lines through what was estimated."""
        if not self.answers:
            return self._begin(None)
        if beyond and (len(self.answers) > MOST_BY_LINES or self._room(end) >= 0):
            return math.sqrt(max(1, *fitting[-1:]) * end)
        if len(self.answers) == 1:
            (number,) = self.answers
            return self._begin((number, self._room(number)))
        if not fitting:  # below two that do not fit, a line through them never underestimates, either
            return self._end_of_room(*beyond) if len(beyond) == 2 else self._least
        sides = [(fitting[-1], end)] if beyond else []
        sides += [(fitting[-2], fitting[-1])] if len(fitting) > 1 else []
        return sum(min(self._end_of_room(*side), end) for side in sides) / len(sides)

    def _end_of_room(self, fewer: int, more: int) -> float:
        """Return the number at which memory ends, by a line through two numbers."""
        room, less = self._room(fewer), self._room(more)
        return fewer + room / (room - less) * (more - fewer) if less < room else math.inf

    def _room(self, number: int) -> float:
        return self._room_of(self.answers[number])
