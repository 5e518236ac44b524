"""Signals that ask a program to stop: every handler, from the first import to the end.

SIGINT is Ctrl-C, SIGTERM comes from a launcher or before a spot machine is reclaimed, SIGHUP when the terminal or its
connection is gone, SIGUSR1 from a scheduler before a job's time is over (``sbatch --signal=USR1@120``).

In a command each raises ``KeyboardInterrupt``. Its text, if it has one, continues "Stopped by SIGINT": the code that
knows what has been done by then adds it. Training takes over all of them while there is something to save.

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

from lowmem_ft.foundation.system.launch_variables import is_main_process

logger = logging.getLogger(__name__)

SIGNALLED = 128
"""Base of the exit code of a process that a signal ended: shells add the signal's number."""

ONE_REQUEST_SECONDS = 1.0
"""Signals closer than this are one request: a terminal sends Ctrl-C to every process, and torchrun passes it on."""

NOTHING_DONE = "before it was finished: nothing was written."
NOTHING_TRAINED = "before the first step: nothing was trained, and nothing was written."

_RETRY_SECONDS = 0.02

_STOP_SIGNALS = tuple(
    signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)
"""Signals that ask to stop; Windows has the first two."""

_ONLY_IF_UNCLAIMED = _STOP_SIGNALS[2:]
"""Signals that other code takes for purposes of its own, such as stacks or a new start of the job: it keeps them."""

_terminated: list[tuple[int, float]] = []
"""Signal other than SIGINT that has come to this process, and its time."""


@contextlib.contextmanager
def handlers(new: Callable[[int, Any], Callable[[int, FrameType | None], Any] | None]) -> Iterator[None]:
    """Replace the handlers of the signals that ask to stop in a block, unless other code replaces them within it.

    An ignored signal stays ignored, as SIGHUP is behind ``nohup``. Does nothing outside the main thread, which alone
    gets signals.

    Args:
        new: takes the signal's number and the present handler, and returns the new one; None: the present one stays.
    """
    replaced: dict[int, tuple[Any, Any]] = {}
    if threading.current_thread() is threading.main_thread():
        for number in _STOP_SIGNALS:
            before = signal.getsignal(number)
            if before is signal.SIG_IGN or (number in _ONLY_IF_UNCLAIMED and _is_claimed(number, before)):
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
    return not _is_ours(handler)


def _is_ours(handler: Any) -> bool:
    return str(getattr(handler, "__module__", "")).startswith("lowmem_ft.")


def _is_caught_in_c(number: int) -> bool:
    """Return whether native code, such as ``faulthandler.register``, has a handler that Python does not know of."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


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
        with contextlib.suppress(OSError):  # the terminal may be gone
            sys.stderr.write(f"Stopped by {signal.Signals(number).name} {leaves}\n")
            sys.stderr.flush()
    os._exit(SIGNALLED + number)


@contextlib.contextmanager
def stops_as_ctrl_c() -> Iterator[None]:
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
        is_outermost = any(signal.getsignal(number) is stop for number in _STOP_SIGNALS)
        try:
            yield
        finally:
            if is_outermost:
                _terminated.clear()


def end_by_signals() -> None:
    """Let every signal but SIGINT end this process as usual, for a forked one that does the work of its parent."""
    for number in _STOP_SIGNALS[1:]:
        if _is_ours(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def stops_held_back() -> Iterator[Callable[[], None]]:
    """Hold back the signals that ask to stop, as between a fork and the handlers of both processes.

    Yields a function that lets them come: in the process that forked, and in the one that was forked.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)

    def let_come() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        yield let_come
    finally:
        let_come()


def was_terminated() -> bool:
    """Return whether a signal other than Ctrl-C has come."""
    return bool(_terminated)


def stopped_by() -> signal.Signals:
    """Return the signal that caused a ``KeyboardInterrupt``."""
    return signal.Signals(_terminated[0][0]) if _terminated else signal.SIGINT


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
    """Yield a function that raises the ``KeyboardInterrupt`` of a signal in this block, if it was lost.

    Signals raise it as usual, but Python drops an exception in a finalizer, and a trace runs thousands of those.
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
    """Delay the handlers of signals while the main thread runs code through which no exception may pass.

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
    """Let a signal that asks to stop end the process during a wait in C++, in which Python calls no signal handler.

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
        if not _is_ours(before) and before is not signal.default_int_handler:
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
    """Let processes that are forked in this block ignore SIGINT and SIGHUP, which a terminal sends them, too.

    The process that forked them gets them and ends those; each would print a traceback of its own.
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
        for number in (signal.SIGINT, *_ONLY_IF_UNCLAIMED[:1]):
            signal.signal(number, signal.SIG_IGN)


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_ignore_in_fork)


class Interruption(contextlib.ExitStack):
    """Context that records a signal that asks to stop instead of ending the process; a later second signal ends it.

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
