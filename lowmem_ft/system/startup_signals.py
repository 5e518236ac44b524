"""The first moments of a program, in which a signal can arrive while its own modules are still being imported.

Programs import this module before any other module of the package or of their own, so it imports next to nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

SIGNALLED = 128
"""Base of the exit code of a process that a signal ended: shells add the signal's number."""

NOTHING_DONE = "before it was finished: nothing was written."


def end_at_ctrl_c() -> None:
    """Make SIGINT end the process with a message until :func:`raise_at_ctrl_c`; an ignored SIGINT stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_at_ctrl_c() -> None:
    """Make SIGINT raise ``KeyboardInterrupt`` again, once the program can catch it."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_main_process() -> bool:
    """Return whether this process speaks for all of its launch, by the variables that every launcher sets."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"


def is_launched() -> bool:
    """Return whether this is one of several processes that find each other by the variables that launchers set."""
    size = os.environ.get("WORLD_SIZE", "")
    return "LOCAL_RANK" in os.environ and size.isdigit() and int(size) > 1


def _end(number: int, frame: FrameType | None) -> None:
    """End at once: an exception would pass through half-imported modules, which may turn it into another one."""
    if is_main_process():
        sys.stderr.write(f"Stopped by {signal.Signals(number).name} {NOTHING_DONE}\n")
        sys.stderr.flush()
    os._exit(SIGNALLED + number)
