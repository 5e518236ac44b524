"""A handle on a technique that is switched on, to switch it off again.

Undo calls find parameters by name, where they are. FSDP2 replaces each by its shard, and frees none that a bound
method, a set or a closure still holds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Handle:
    """The return value of every ``enable_*``: ``remove()`` undoes it exactly, as does the end of a ``with`` block.

    Args:
        *undo: called in reverse order by the first ``remove()``; later calls do nothing. If one fails, the others are
            still called.
    """

    def __init__(self, *undo: Callable[[], object]) -> None:
        self._undo = ExitStack()
        self.active = True
        self.undo_first(*undo)

    def undo_first(self, *undo: Callable[[], object]) -> None:
        """Add functions that ``remove()`` calls before all those given until now, also in reverse order."""
        for one in undo:
            self._undo.push(partial(_call, one))

    def remove(self) -> None:
        """Restore the state from before; calling it twice is harmless.

        Raises:
            Exception: the last error of an undo, once all have been called, with the earlier ones as its context.
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
    """Call ``undo`` from an ``ExitStack``, and keep an earlier error as context, which the stack does not do itself."""
    try:
        undo()
    except BaseException as later:
        if later is not error:
            later.__context__ = later.__context__ or error
        raise
