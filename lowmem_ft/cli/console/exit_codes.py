"""Ends of a command: a user's error is a few lines on stderr and an exit code, never a traceback."""

from __future__ import annotations

import errno
import functools
import os
import select
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

from lowmem_ft.foundation.errors import (
    DoesNotFitError,
    Interrupted,
    OtherProcessError,
    UserError,
    is_panic,
    machine_problem,
    panic_problem,
)
from lowmem_ft.foundation.system.launch_variables import is_main_process
from lowmem_ft.foundation.system.signals import (
    SIGNALLED,
    raise_at_ctrl_c,
    raise_at_signals,
    stop_behind,
    stopped_by,
    was_terminated,
    words_of,
)
from lowmem_ft.foundation.system.visible import visible
from lowmem_ft.reports.text.wrapping import filled

EXIT_NOBODY_READS = 141
"""128 + SIGPIPE: stdout was closed, as by ``| head``."""

MORE_ON_MEMORY = "More ways to need less memory: `lowmem-ft docs out_of_memory`."

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Command(Protocol):
    """A subcommand: takes arguments (None: those of this process) and returns an exit code."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...  # noqa: D102


def explains_user_errors(command: Callable[[list[str]], int]) -> Command:
    """Wrap a command to print each problem of a ``UserError`` on its own line; our own bugs pass through."""

    @functools.wraps(command)
    def explained(argv: Sequence[str] | None = None) -> int:
        with raise_at_signals():
            exit_code = _explained(command, list(sys.argv[1:] if argv is None else argv))
            return SIGNALLED + stopped_by() if was_terminated() else exit_code

    return explained


def _explained(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    try:
        _open_closed_streams()
        raise_at_ctrl_c()
        exit_code = _exit_code_of(command, arguments)
        sys.stdout.flush()
        return exit_code
    except Interrupted as stop:
        return _tell_of_stop(str(stop), stop.exit_code)
    except KeyboardInterrupt as stop:
        if isinstance(stop.__context__, OtherProcessError):
            return _tell(stop.__context__)  # a launcher ends this process for it, too
        return _tell_of_stop(words_of(stop), SIGNALLED + stopped_by())
    except Exception as error:
        if (stop := stop_behind(error)) is not None:
            return _tell_of_stop(words_of(stop), SIGNALLED + stopped_by())
        if _may_be_of_a_stream(error) and (why := _give_up(sys.stdout)) is not None:
            if isinstance(why, BrokenPipeError):  # and not another pipe, such as a data loader worker's
                return EXIT_NOBODY_READS
            return _tell(
                UserError(f"The output cannot be written: {why.strerror}. Write it to a disk that has room.")
            )
        if isinstance(error, OSError) and (problem := machine_problem(error)) is not None:
            return _tell(UserError(problem))
        if isinstance(error, FileNotFoundError) and _is_nowhere():
            return _tell(
                UserError("The current folder has been deleted. Go to one that exists: cd /path/to/it.")
            )
        if isinstance(error, UserError):
            return _tell(error)
        raise
    except BaseException as error:
        if is_panic(error):
            return _tell(UserError(panic_problem(error)))
        raise


def _is_nowhere() -> bool:
    """Return whether the working folder is gone, by which every relative path fails."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _exit_code_of(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    try:
        return command(arguments)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich exits like this, with 1
            return EXIT_NOBODY_READS
        if end.code not in (None, 0):
            raise
        return 0  # argparse, after --help and --version


def _open_closed_streams() -> None:
    """Open closed standard streams (``>&-``) on the null device: Python has None, and the next file would be stdout."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - until the process ends
            setattr(sys, name, stream)


def _may_be_of_a_stream(error: BaseException) -> bool:
    is_full = isinstance(error, OSError) and error.errno in _FULL and error.filename is None
    return is_full or isinstance(error, BrokenPipeError)


def _give_up(output: TextIO) -> OSError | None:
    """Return why a stream takes no more, or None; a dead one goes to the null device, or Python would fail at exit."""
    try:
        if not _is_read(output):
            raise BrokenPipeError
        # Nothing else shows it: an unbuffered stream has forgotten what it could not write.
        output.write("\n")
        output.flush()
        return None
    except OSError as why:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
        return why


def _is_read(output: TextIO) -> bool:
    """Return whether a pipe has a reader."""
    poll = select.poll()
    poll.register(output, 0)
    return not any(events & select.POLLERR for _, events in poll.poll(0))


def _say(text: str) -> None:
    """Print on stderr, if that takes anything."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _give_up(sys.stderr)


def _tell_of_stop(words: str, exit_code: int) -> int:
    if is_main_process():
        _say(for_stderr(words))
    return exit_code


def _tell(error: UserError) -> int:
    """Print each problem on lines of its own, filled to the terminal's width; unfilled in a file or a pipe."""
    if _speaks_for(error):
        for problem in error.problems:
            _say(for_stderr(f"error: {visible(problem)}"))
        if isinstance(error, DoesNotFitError):
            _say(for_stderr(MORE_ON_MEMORY))
    return error.exit_code


def for_stderr(text: str) -> str:
    """Return a text filled to the terminal's width; as it is where stderr is a file or a pipe."""
    if not sys.stderr.isatty():
        return text
    return "\n".join(filled(text, shutil.get_terminal_size().columns, hanging="  "))


def _speaks_for(error: UserError) -> bool:
    """Return whether this process prints an error of its launch."""
    if "torch.distributed" not in sys.modules:
        return is_main_process()
    from lowmem_ft.training.processes.rendezvous import is_first_to_say

    return is_first_to_say(str(error))
