"""Ctrl-C that is not lost: Python drops the exception where it meets a finalizer, of which a trace runs thousands."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class CtrlC:
    """Remembers a Ctrl-C within its ``with`` block, beside the ``KeyboardInterrupt`` that it raises as ever.

    It does nothing outside the main thread, which alone gets signals, or where the program has a handler of its own.
    """

    def __init__(self) -> None:
        self._was_pressed = False
        self._is_ours = False

    def __enter__(self) -> CtrlC:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._press)
            self._is_ours = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def check(self) -> None:
        """Raise what a finalizer has dropped.

        Raises:
            KeyboardInterrupt: if Ctrl-C was pressed.
        """
        if self._was_pressed:
            raise KeyboardInterrupt

    def _press(self, number: int, frame: FrameType | None) -> None:
        self._was_pressed = True
        raise KeyboardInterrupt
