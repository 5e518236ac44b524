"""Ctrl-C that is not lost: Python drops the exception if it hits a finalizer, and a trace runs thousands of those."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class CtrlC:
    """Remembers a Ctrl-C within its ``with`` block, in addition to raising ``KeyboardInterrupt`` as usual.

    Does the same for SIGTERM, if the program makes it raise that. Does nothing outside the main thread, which alone
    gets signals.
    """

    def __init__(self) -> None:
        self._was_pressed = False
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __enter__(self) -> CtrlC:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._press)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._press:  # a handler may have put another in its place
                signal.signal(number, handler)

    def check(self) -> None:
        """Raise the exception that a finalizer has dropped.

        Raises:
            KeyboardInterrupt: if Ctrl-C was pressed.
        """
        if self._was_pressed:
            raise KeyboardInterrupt

    def _press(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handlers[number](number, frame)
        except KeyboardInterrupt:
            self._was_pressed = True
            raise
