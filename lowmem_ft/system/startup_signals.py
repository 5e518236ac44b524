"""The first moments of a program: it is told to stop while its own modules are still being imported.

Programs import this module before any other of the package and of theirs, so it imports next to nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

SIGNALLED = 128
"""With a signal's number on top, the exit code of a process that it ended, as shells have it."""

NOTHING_DONE = "before it was done: nothing is written."


def end_at_ctrl_c() -> None:
    """Let SIGINT end the process with a line until :func:`raise_at_ctrl_c`; where it is ignored, it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_at_ctrl_c() -> None:
    """Let SIGINT raise ``KeyboardInterrupt`` again, for somebody is there who catches it."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_main_process() -> bool:
    """Whether this is the process of a launch that speaks for all, by the variables every launcher sets."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"


def is_launched() -> bool:
    """Whether this is one process of several that find each other by the variables every launcher sets."""
    size = os.environ.get("WORLD_SIZE", "")
    return "LOCAL_RANK" in os.environ and size.isdigit() and int(size) > 1


def _end(number: int, frame: FrameType | None) -> None:
    """At once: an exception would pass through half-imported modules, which may make another one of it."""
    if is_main_process():
        sys.stderr.write(f"Stopped by {signal.Signals(number).name} {NOTHING_DONE}\n")
        sys.stderr.flush()
    os._exit(SIGNALLED + number)
