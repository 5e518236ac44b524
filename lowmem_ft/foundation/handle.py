"""A technique that was switched on, and the way to switch it off again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Handle:
    """What every ``enable_*`` returns: ``remove()`` undoes it exactly, and a ``with`` block undoes it at its end.

    Args:
        *undo: called in reverse order by the first ``remove()``; later calls do nothing. One that fails keeps none of
            the others from being called.
    """

    def __init__(self, *undo: Callable[[], object]) -> None:
        self._undo = ExitStack()
        self.active = True
        self.undo_first(*undo)

    def undo_first(self, *undo: Callable[[], object]) -> None:
        """Add what ``remove()`` is to call, in reverse order too, before all that was given until now."""
        for one in undo:
            self._undo.push(partial(_call, one))

    def remove(self) -> None:
        """Restore what was there before; calling it twice is harmless.

        Raises:
            Exception: what an undo raised, once all are called; the last, with those before it as its context.
        """
        self.active = False
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _call(
    undo: Callable[[], object],
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """What an ``ExitStack`` calls; of errors before this one it keeps none by itself."""
    try:
        undo()
    except BaseException as later:
        if later is not error:
            later.__context__ = later.__context__ or error
        raise
