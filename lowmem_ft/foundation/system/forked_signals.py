"""Signals that ask to stop, around a fork: which of the two processes gets them, and what the new one does."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

from lowmem_ft.foundation.system.signals import STOP_SIGNALS, is_ours


@contextlib.contextmanager
def block_signals() -> Iterator[Callable[[], None]]:
    """Block the signals that ask to stop, as between a fork and the handlers of both processes.

    Yields a function that lets them come: in the process that forked, and in the one that was forked.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def let_come() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        yield let_come
    finally:
        let_come()


def end_by_signals() -> None:
    """Let every signal but SIGINT end this process as usual, for a forked one that does the work of its parent."""
    for number in STOP_SIGNALS[1:]:
        if is_ours(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


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
        for number in (signal.SIGINT, *STOP_SIGNALS[2:3]):
            signal.signal(number, signal.SIG_IGN)


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_ignore_in_fork)
