"""Signals that ask a program to stop: every handler, from the first import to the end.

SIGINT is Ctrl-C, SIGTERM comes from a launcher or before a spot machine is reclaimed, SIGHUP when the terminal or its
connection is gone, SIGUSR1 from a scheduler before a job's time is over (``sbatch --signal=USR1@120``).

In a command each raises ``KeyboardInterrupt``. Its text, if it has one, continues "Stopped by SIGINT": the code that
knows what has been done by then adds it. Training takes over all of them while there is something to save.

Programs import this module before any other module of the package or of their own, so that signals are handled during
those imports. It therefore imports only the standard library.

``interrupts.py`` decides about signals in one block of code, and ``forked_signals.py`` around a fork.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from lowmem_ft.foundation.system.launch_variables import is_main_process

SIGNALLED = 128
"""Base of the exit code of a process that a signal ended: shells add the signal's number."""

ONE_REQUEST_SECONDS = 1.0
"""Signals closer than this are one request: a terminal sends Ctrl-C to every process, and torchrun passes it on."""

NOTHING_DONE = "before it was finished: nothing was written."
NOTHING_TRAINED = "before the first step: nothing was trained, and nothing was written."

STOP_SIGNALS = tuple(
    signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)
"""Signals that ask to stop; Windows has the first two."""

_TAKEN_IF_UNCLAIMED = STOP_SIGNALS[2:]
"""Signals that other code takes for purposes of its own, such as stacks or a new start of the job: it keeps them."""

_terminated: list[tuple[int, float]] = []
"""Signal other than SIGINT that has come to this process, and its time."""


@contextlib.contextmanager
def handlers(new: Callable[[int, Any], Callable[[int, FrameType | None], Any] | None]) -> Iterator[None]:
    """Replace the handlers of the signals that ask to stop in a block, unless other code replaces them within it.

    An ignored signal stays ignored, as SIGHUP is behind ``nohup``. Does nothing outside the main thread, because only
    the main thread gets signals.

    Args:
        new: takes the signal's number and the present handler, and returns the new one; None: the present one stays.
    """
    replaced: dict[int, tuple[Any, Any]] = {}
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            before = signal.getsignal(number)
            if before is signal.SIG_IGN or (number in _TAKEN_IF_UNCLAIMED and _is_claimed(number, before)):
                continue
            handler = new(number, before)
            if handler is not None:
                signal.signal(number, handler)
                replaced[number] = handler, before
    try:
        yield
    finally:
        for number, (handler, before) in replaced.items():
            if signal.getsignal(number) == handler:
                # None: another library's handler in C, which Python cannot restore
                signal.signal(number, before or signal.SIG_DFL)


def _is_claimed(number: int, handler: Any) -> bool:
    """Return whether a handler is neither the system's own nor one of lowmem_ft."""
    if handler is signal.SIG_DFL:
        return _is_caught_in_c(number)
    return not is_ours(handler)


def is_ours(handler: Any) -> bool:
    """Return whether a handler is one of lowmem_ft."""
    return str(getattr(handler, "__module__", "")).startswith("lowmem_ft.")


def _is_caught_in_c(number: int) -> bool:
    """Return whether native code, such as ``faulthandler.register``, has a handler that Python cannot see."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def end_at_ctrl_c() -> None:
    """Make SIGINT end the process with a message until :func:`raise_at_ctrl_c`; an ignored SIGINT stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)


def raise_at_ctrl_c() -> None:
    """Make SIGINT raise ``KeyboardInterrupt`` again, once the program can catch it."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_at_once(number: int, frame: FrameType | None, leaves: str = NOTHING_DONE) -> None:
    """Handle a signal by the end of the process; ``leaves`` is as in :func:`interrupts.on_interrupt`.

    During imports an exception would pass through half-imported modules, which may turn it into another one.
    """
    if is_main_process():
        with contextlib.suppress(OSError):  # the terminal may be gone
            sys.stderr.write(f"Stopped by {signal.Signals(number).name} {leaves}\n")
            sys.stderr.flush()
    os._exit(SIGNALLED + number)


@contextlib.contextmanager
def raise_at_signals() -> Iterator[None]:
    """Let the other signals raise ``KeyboardInterrupt``, too; a later one ends the process, whatever it does.

    One that follows at once is the same request: a job's scheduler signals each process, and a launcher passes it on.

    Leaves a signal alone for which the program has a handler of its own. A forked process ends by the signal as usual:
    pools end their workers that way.
    """
    process_id = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process_id:
            if not _terminated:
                _terminated.append((number, time.monotonic()))
                raise KeyboardInterrupt
            if time.monotonic() - _terminated[0][1] <= ONE_REQUEST_SECONDS:
                return
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def new(number: int, before: Any) -> Any:
        return stop if number != signal.SIGINT and before is signal.SIG_DFL else None

    with handlers(new):
        is_outermost = any(signal.getsignal(number) is stop for number in STOP_SIGNALS)
        try:
            yield
        finally:
            if is_outermost:
                _terminated.clear()


def was_terminated() -> bool:
    """Return whether a signal other than Ctrl-C has come."""
    return bool(_terminated)


def stopped_by() -> signal.Signals:
    """Return the signal that caused a ``KeyboardInterrupt``."""
    return signal.Signals(_terminated[0][0]) if _terminated else signal.SIGINT


def words_of(stop: KeyboardInterrupt) -> str:
    """Return the line about a command that was stopped."""
    return f"Stopped by {stopped_by().name} {stop if stop.args else NOTHING_DONE}"


def stop_behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the signal that caused an error: a module whose import was interrupted may raise an error of its own."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error
