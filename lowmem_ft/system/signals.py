"""SIGINT (Ctrl-C) and SIGTERM (a launcher, a reclaimed spot machine): every handler, from the first import to the end.

In a command both raise ``KeyboardInterrupt``. Its text, if it has one, continues "Stopped by SIGINT": the code that
knows what has been done by then adds it. Training takes over both signals while there is something to save.

Programs import this module before any other module of the package or of their own, so that a signal can arrive while
those are still being imported: it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from lowmem_ft.system.launch_variables import is_main_process

logger = logging.getLogger(__name__)

SIGNALLED = 128
"""Base of the exit code of a process that a signal ended: shells add the signal's number."""

ONE_REQUEST_SECONDS = 1.0
"""Signals closer than this are one request: a terminal sends Ctrl-C to every process, and torchrun passes it on."""

NOTHING_DONE = "before it was finished: nothing was written."
NOTHING_TRAINED = "before the first step: nothing was trained, and nothing was written."

_RETRY_SECONDS = 0.02

_terminated: list[float] = []
"""Time of the SIGTERM that has come to this process: a search takes the exception for a request for the best so far."""


@contextlib.contextmanager
def handlers(new: Callable[[int, Any], Callable[[int, FrameType | None], Any] | None]) -> Iterator[None]:
    """Replace the handlers of SIGINT and SIGTERM in a block, unless other code replaces them within it.

    Does nothing outside the main thread, which alone gets signals.

    Args:
        new: takes the signal's number and the present handler, and returns the new one; None: the present one stays.
    """
    replaced: dict[int, tuple[Any, Any]] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.getsignal(number)
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


def end_at_ctrl_c() -> None:
    """Make SIGINT end the process with a message until :func:`raise_at_ctrl_c`; an ignored SIGINT stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_at_ctrl_c() -> None:
    """Make SIGINT raise ``KeyboardInterrupt`` again, once the program can catch it."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None, leaves: str = NOTHING_DONE) -> None:
    """End at once: an exception would pass through half-imported modules, which may turn it into another one."""
    if is_main_process():
        sys.stderr.write(f"Stopped by {signal.Signals(number).name} {leaves}\n")
        sys.stderr.flush()
    os._exit(SIGNALLED + number)


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Let SIGTERM raise ``KeyboardInterrupt``; a later one ends the process, whatever it does.

    One that follows at once is the same request: a job's scheduler signals each process, and a launcher passes it on.

    Does nothing if the program has a handler of its own. A forked process ends by the signal as usual: pools end their
    workers that way.
    """
    process_id = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process_id:
            if not _terminated:
                _terminated.append(time.monotonic())
                raise KeyboardInterrupt
            if time.monotonic() - _terminated[0] <= ONE_REQUEST_SECONDS:
                return
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def new(number: int, before: Any) -> Any:
        return stop if number == signal.SIGTERM and before is signal.SIG_DFL else None

    with handlers(new):
        is_outermost = signal.getsignal(signal.SIGTERM) is stop
        try:
            yield
        finally:
            if is_outermost:
                _terminated.clear()


def was_terminated() -> bool:
    """Return whether SIGTERM has come."""
    return bool(_terminated)


def stopped_by() -> signal.Signals:
    """Return the signal that caused a ``KeyboardInterrupt``."""
    return signal.SIGTERM if _terminated else signal.SIGINT


def words_of(stop: KeyboardInterrupt) -> str:
    """Return the line about a command that was stopped."""
    return f"Stopped by {stopped_by().name} {stop if stop.args else NOTHING_DONE}"


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


@contextlib.contextmanager
def stops_remembered() -> Iterator[Callable[[], None]]:
    """Yield a function that raises the ``KeyboardInterrupt`` of a Ctrl-C or SIGTERM in this block, if it was lost.

    Both signals raise it as usual, but Python drops an exception in a finalizer, and a trace runs thousands of those.
    """
    lost: list[int] = []

    def new(number: int, before: Any) -> Any:
        def remember(number: int, frame: FrameType | None) -> None:
            try:
                before(number, frame)
            except KeyboardInterrupt:
                lost.append(number)
                raise

        return remember if callable(before) else None

    def check() -> None:
        if lost:
            raise KeyboardInterrupt

    with handlers(new):
        yield check


@contextlib.contextmanager
def signals_wait_while(is_busy: Callable[[], bool]) -> Iterator[None]:
    """Delay the handlers of SIGINT and SIGTERM while the main thread runs code through which no exception may pass.

    Args:
        is_busy: whether it does so now.
    """

    def new(number: int, before: Any) -> Any:
        def wait_or_handle(number: int, frame: FrameType | None) -> None:
            if not is_busy():
                before(number, frame)
                return
            again = threading.Timer(_RETRY_SECONDS, signal.raise_signal, (number,))
            again.daemon = True
            again.start()

        return wait_or_handle if callable(before) else None

    with handlers(new):
        yield


@contextlib.contextmanager
def signals_end_at_once(leaves: str) -> Iterator[None]:
    """Let SIGINT and SIGTERM end the process during a wait in C++, in which Python calls no signal handler.

    A handler that is neither lowmem_ft's nor Python's own stays.

    Args:
        leaves: what is left behind; continues "Stopped by SIGINT", and ends in a full stop.
    """
    replaced: set[int] = set()
    reader, writer = socket.socketpair()
    ending = threading.Lock()

    def end(number: int, frame: FrameType | None = None) -> None:
        if ending.acquire(blocking=False):  # by the thread or, once that hears nothing, by the handler
            _end(number, frame, leaves)

    def new(number: int, before: Any) -> Any:
        is_ours = str(getattr(before, "__module__", "")).startswith("lowmem_ft.")
        if not is_ours and before is not signal.default_int_handler:
            return None
        replaced.add(number)
        return end

    def listen() -> None:
        while came := reader.recv(1):
            if came[0] in replaced:
                end(came[0])

    with reader, writer, handlers(new):
        if not replaced:
            yield
            return
        writer.setblocking(False)
        descriptor_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=listen, name="lowmem_ft signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor_before)
            writer.close()
            thread.join()


@contextlib.contextmanager
def forks_ignore_ctrl_c() -> Iterator[None]:
    """Let processes that are forked in this block ignore SIGINT, which a terminal sends them, too.

    The process that forked them gets it and ends them; each would print a traceback of its own.
    """
    _blocks_of_forks.append(None)
    try:
        yield
    finally:
        _blocks_of_forks.pop()


_blocks_of_forks: list[None] = []
"""One entry for each block of :func:`forks_ignore_ctrl_c` that the process is in."""


def _ignore_in_fork() -> None:
    if _blocks_of_forks:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_ignore_in_fork)


class Interruption(contextlib.ExitStack):
    """Context that records SIGINT and SIGTERM instead of ending the process; a later second signal ends it.

    Python allows signal handlers only in the main thread; elsewhere (a notebook's worker, a test) this does nothing.

    Attributes:
        signal_number: number of the signal; 0: none has come.
    """

    def __init__(self) -> None:
        super().__init__()
        self.signal_number = 0
        self._first_seconds = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        self.enter_context(handlers(self._new))
        return self

    def _new(self, number: int, before: Any) -> Callable[[int, FrameType | None], Any]:
        self._before[number] = before or signal.SIG_DFL
        return self._remember

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.signal_number:
            self.signal_number, self._first_seconds = number, now
            logger.warning(
                "%s received: saving at the end of this step, then stopping. Send it again to stop at once.",
                signal.Signals(number).name,
            )
        elif now - self._first_seconds > ONE_REQUEST_SECONDS:
            for each, before in self._before.items():  # also if other code calls this handler from its own
                signal.signal(each, before)
            signal.raise_signal(number)
