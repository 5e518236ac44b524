"""SIGINT (Ctrl-C) and SIGTERM at any moment of a command: it ends tidily, and says what it leaves behind.

Both raise ``KeyboardInterrupt``. Its text, if it has one, continues "Stopped by SIGINT": the code that knows what has
been done by then adds it. Training takes over both signals while there is something to save.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from lowmem_ft.system.startup_signals import NOTHING_DONE
from lowmem_ft.training.run.interruption import ONE_REQUEST_SECONDS

_terminated: list[int] = []
"""SIGTERM, once it has come to this process: a search takes the exception for a request for the best so far."""


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Let SIGTERM raise ``KeyboardInterrupt``; a later one ends the process, whatever it does.

    One that follows at once is the same request: a job's scheduler signals each process, and a launcher passes it on.

    Does nothing outside the main thread, which alone gets signals, or if the program has a handler of its own. A forked
    process ends by the signal as usual: pools end their workers that way.
    """
    process_id = os.getpid()

    first_seconds = 0.0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal first_seconds
        is_forked, now = os.getpid() != process_id, time.monotonic()
        if not is_forked and not _terminated:
            first_seconds = now
            _terminated.append(number)
            raise KeyboardInterrupt
        if is_forked or now - first_seconds > ONE_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _terminated.clear()


@contextlib.contextmanager
def if_stopped(leaves: str) -> Iterator[None]:
    """Add what is left behind to a ``KeyboardInterrupt`` of the block, unless it has a text already.

    Args:
        leaves: continues "Stopped by SIGINT", and ends in a full stop.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.args = stop.args or (leaves,)
        raise


def stop_behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the signal that caused an error: a module whose import was interrupted may raise an error of its own."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def was_terminated() -> bool:
    """Return whether SIGTERM has come."""
    return bool(_terminated)


def stopped_by() -> signal.Signals:
    """Return the signal that caused a ``KeyboardInterrupt``."""
    return signal.SIGTERM if _terminated else signal.SIGINT


def words_of(stop: KeyboardInterrupt) -> str:
    """Return the line about a command that was stopped."""
    return f"Stopped by {stopped_by().name} {stop if stop.args else NOTHING_DONE}"
