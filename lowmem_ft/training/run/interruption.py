"""Interruption of a run by Ctrl-C or SIGTERM (a reclaimed spot machine): it ends between steps, with a checkpoint."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType

logger = logging.getLogger(__name__)

ONE_REQUEST_SECONDS = 1.0
"""Signals closer than this are one request: a terminal sends Ctrl-C to every process, and torchrun passes it on."""


class Interruption:
    """Context that records SIGINT and SIGTERM instead of ending the process; a later second signal ends it.

    Python allows signal handlers only in the main thread; elsewhere (a notebook's worker, a test) this does nothing.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._first_seconds = 0.0
        self._previous: dict[int, signal._HANDLER] = {}

    @property
    def requested(self) -> bool:
        """True once a signal has been received."""
        return self.signal_number is not None

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                # None: another library's handler in C, which Python cannot restore
                self._previous[number] = signal.signal(number, self._remember) or signal.SIG_DFL
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put_back()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal_number is None:
            self.signal_number, self._first_seconds = number, now
            logger.warning(
                "%s received: saving at the end of this step, then stopping. Send it again to stop at once.",
                signal.Signals(number).name,
            )
        elif now - self._first_seconds > ONE_REQUEST_SECONDS:
            self._put_back()
            signal.raise_signal(number)

    def _put_back(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def signals_end_at_once() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the process at once during a wait in C++, in which Python calls no signal handler.

    This does nothing outside the main thread. A handler that is neither lowmem_ft's nor Python's own stays.
    """
    is_main = threading.current_thread() is threading.main_thread()
    present = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if is_main}
    before = {number: handler for number, handler in present.items() if _is_replaceable(handler)}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_replaceable(handler: object) -> bool:
    is_ours = str(getattr(handler, "__module__", "")).startswith("lowmem_ft.")
    return is_ours or handler is signal.default_int_handler
