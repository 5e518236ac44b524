"""A technique that was switched on, and the way to switch it off again."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Handle:
    """What every ``enable_*`` returns: ``remove()`` undoes it exactly, and a ``with`` block undoes it at its end.

    Args:
        *undo: called in reverse order by the first ``remove()``; later calls do nothing.
    """

    def __init__(self, *undo: Callable[[], object]) -> None:
        self._undo = list(undo)
        self.active = True

    def remove(self) -> None:
        """Restore what was there before; calling it twice is harmless."""
        self.active = False
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
