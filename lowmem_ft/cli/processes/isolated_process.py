"""A process of its own for a user's program; if a signal kills it, the error explains that in a sentence.

It is the command itself, forked: it has the terminal, prints what the command prints, and returns an exit code alone.
So it is no ``foundation/system/child_process.py``, which answers questions and is killed.
"""

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
from lowmem_ft.foundation.system.forked_signals import block_signals, end_by_signals
from lowmem_ft.foundation.system.signals import SIGNALLED, handlers

_GRACE_SECONDS = 2.0
"""Seconds that the child has to end after a signal of a terminal, which reaches both, before it gets that again."""

_WHY = {
    "SIGKILL": (
        "the system sends this signal when host memory has run out. Free some, or give the script less data"
    ),
    "SIGXCPU": "it has used up its limit of processor time. Raise it: ulimit -t",
}
"""Reason and way out for signals, by their names: Windows has none of them."""
_CRASH = (
    "native code has crashed, in a library or in the script. To see where, run the script itself with python -X "
    "faulthandler"
)


def in_own_process(work: Callable[[], int], program: str) -> int:
    """Run work in a forked process and wait for it.

    Runs it in this process if there is no fork, or if torch is imported: a forked process could run no backward pass.

    Args:
        work: returns the exit code; the child reports its ``UserError``.
        program: name of the program that it runs, for the error.

    Returns:
        The exit code.

    Raises:
        CrashedError: if a signal ended the process that was not sent to this one.
    """
    if not hasattr(os, "fork") or "torch" in sys.modules:
        return work()
    sys.stdout.flush()
    sys.stderr.flush()
    with block_signals() as let_stops_come:  # one in between would end this process, and not reach the child
        child = os.fork()
        if child == 0:
            end_by_signals()  # the inherited handlers take the child for a worker

            def run(argv: list[str]) -> int:
                let_stops_come()
                return work()

            return explains_user_errors(run)()
        with _passing_signals_on(child) as passed_on:
            let_stops_come()
            status = os.waitpid(child, 0)[1]
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    number = -code
    if number in passed_on:
        return SIGNALLED + number
    name = signal.Signals(number).name
    raise CrashedError(
        f"{program} was ended by {name} while it was estimated, so no estimate was made: {_WHY.get(name, _CRASH)}."
    )


@contextlib.contextmanager
def _passing_signals_on(child: int) -> Iterator[list[int]]:
    """Pass signals on to the child, so that it ends as the user asked; yield the list of those that came."""
    came: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if number in (signal.SIGINT, getattr(signal, "SIGHUP", None)):
            patience = time.monotonic() + _GRACE_SECONDS
            while time.monotonic() < patience:
                if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    return
                time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    with handlers(lambda number, before: pass_on):
        yield came
