"""Somebody else's program runs in a process of its own, whose death by a signal is told in a sentence."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.foundation.errors import CrashedError
from lowmem_ft.system.startup_signals import SIGNALLED

_GRACE_SECONDS = 2.0
"""A terminal's Ctrl-C reaches both processes; the other is told again only if it has not ended by then."""

_WHY: dict[int, str] = {
    signal.SIGKILL: "the system sends it where the host's memory has run out. Free some, or give the script less data",
    signal.SIGXCPU: "its limit of processor time is used up. Raise it: ulimit -t",
}
_CRASH = (
    "code that is not Python has crashed, a library's or its own. To see where, run it itself with "
    "python -X faulthandler"
)


def in_own_process(work: Callable[[], int], program: str) -> int:
    """Do work in a forked process and wait for it.

    It is done here where there is no fork, and where torch is imported: a fork could run no backward pass.

    Args:
        work: returns the exit code; a ``UserError`` of it is told there.
        program: that it runs, in words.

    Returns:
        The exit code.

    Raises:
        CrashedError: if the process was ended by a signal that nobody has sent to this one.
    """
    if not hasattr(os, "fork") or "torch" in sys.modules:
        return work()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # this process's handler knows it for another one
        return explains_user_errors(lambda argv: work())()
    with _passing_signals_on(child) as passed_on:
        status = os.waitpid(child, 0)[1]
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    number = -code
    if number in passed_on:
        return SIGNALLED + number
    name = signal.Signals(number).name
    raise CrashedError(
        f"{program} was ended by {name} while it was estimated, so there is no estimate: {_WHY.get(number, _CRASH)}."
    )


@contextlib.contextmanager
def _passing_signals_on(child: int) -> Iterator[list[int]]:
    """Let the other process end as it is told to; the signals that came are in the list."""
    came: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if number == signal.SIGINT:
            patience = time.monotonic() + _GRACE_SECONDS
            while time.monotonic() < patience:
                if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    return
                time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
