"""The error types, which say what went wrong and whose fault it is, and the exit code of each.

A user's error carries one or more problems; each is one sentence of the form *rule, value seen, way out*.
The command line prints them without a traceback.
"""

from __future__ import annotations

import difflib
import errno
import functools
import shlex
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

__all__ = [
    "CheckpointError",
    "CrashedError",
    "DataError",
    "DoesNotFitError",
    "Interrupted",
    "LostMemoryError",
    "MissingPackageError",
    "ModelError",
    "OtherProcessError",
    "RaceError",
    "RecipeError",
    "UserError",
]

EXIT_OTHER_PROCESS = 1
EXIT_OURS = 1
EXIT_USER_ERROR = 2
EXIT_DOES_NOT_FIT = 3
EXIT_DATA_IS_LOST = 4


class UserError(Exception):
    """The user's input is at fault; the message says the rule, the value seen and the way out."""

    exit_code = EXIT_USER_ERROR

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by problems, as subclasses take other arguments: the error travels between processes."""
        return user_error, (type(self), self.problems)


def user_error(kind: type[UserError], problems: tuple[str, ...]) -> UserError:
    """Make an error of a kind from its problems, whatever arguments that kind's own ``__init__`` takes."""
    error = kind.__new__(kind)
    UserError.__init__(error, *problems)
    return error


def raise_problems(problems: Iterable[str], kind: type[UserError] = UserError) -> None:
    """Raise an error of a kind with all the problems, if there are any."""
    if found := tuple(problems):
        raise kind(*found)


def raise_together(*checks: Callable[[], object]) -> None:
    """Call all checks and raise all their errors at once, so that one mistake does not hide another.

    Args:
        *checks: each passes, or raises a ``UserError`` or the system's ``OSError`` about a file or a disk.

    Raises:
        UserError: with the problems of all checks; if all errors have the same class, an error of that class.
        OSError: if the error is not one that :func:`machine_problem` explains.
    """
    errors: list[UserError] = []
    for check in checks:
        try:
            check()
        except UserError as error:
            errors.append(error)
        except OSError as error:
            if (problem := machine_problem(error)) is None:
                raise
            errors.append(UserError(problem))
    if len(errors) == 1:
        raise errors[0]
    if errors:
        kinds = {type(error) for error in errors}
        problems = dict.fromkeys(problem for error in errors for problem in error.problems)
        raise user_error(kinds.pop() if len(kinds) == 1 else UserError, tuple(problems))


class RecipeError(UserError):
    """A recipe has unknown keys, wrong values or a combination that cannot work; lists all of them."""


class DataError(UserError):
    """Training or evaluation data is missing, malformed or leaves nothing to learn from."""


class ModelError(UserError):
    """A model or tokenizer cannot be found, read or used for causal language modelling."""


class CheckpointError(UserError):
    """A checkpoint cannot be written, or is not one that this run can resume from."""


class DoesNotFitError(UserError):
    """The run needs more memory than there is, or than its budget allows."""

    exit_code = EXIT_DOES_NOT_FIT


class OtherProcessError(UserError):
    """A run of several processes cannot continue, because another one has failed or is gone."""

    exit_code = EXIT_OTHER_PROCESS


class LostMemoryError(UserError):
    """A trace has missed memory, so an estimate from it would be too low: a bug of ours, reported instead."""

    exit_code = EXIT_OURS


class CrashedError(UserError):
    """A process that worked for this one was ended by a signal."""

    exit_code = EXIT_OTHER_PROCESS


class RaceError(UserError):
    """Streams of a program, or the host, use the same memory in an order that no event determines."""


class MissingPackageError(UserError):
    """An optional package that the recipe asks for is not installed."""

    def __init__(self, asked_for_by: str, package: str, extra: str | None = None) -> None:
        install = f"lowmem-ft[{extra}]" if extra else package
        super().__init__(
            f"{asked_for_by} needs the package {package}, which is not installed. Run: pip install '{install}'"
        )


class Interrupted(BaseException):
    """A run was stopped by a signal, and all that it had done is saved.

    Like Ctrl-C itself it is not an ``Exception``, so that a loop over several runs that continues after an error does
    not continue after this. Nor is it a ``KeyboardInterrupt``, which ``torch.multiprocessing`` takes for a worker that
    ended well. Let a script end with ``sys.exit(stop.exit_code)``.

    Args:
        signal_number: number of ``SIGINT``, which Ctrl-C and a notebook's stop button send, of ``SIGTERM``,
            ``SIGHUP`` or ``SIGUSR1``.
        checkpoint: the folder to resume from, by ``training.resume_from_checkpoint``; None: no step had been taken, or
            the run was done.
        model_folder: the finished model, if the signal came while it was being saved; else None.
    """

    def __init__(
        self, signal_number: int, *, checkpoint: Path | None = None, model_folder: Path | None = None
    ) -> None:
        self.signal_number = signal_number
        self.checkpoint = checkpoint
        self.model_folder = model_folder
        left = "There was nothing to save yet."
        if model_folder is not None:
            left = f"The run was finished: its model is {model_folder}."
        elif checkpoint is not None:
            setting = shlex.quote(f"training.resume_from_checkpoint={checkpoint}")
            left = f"Saved: {checkpoint}; resume with {setting}."
        super().__init__(f"Stopped by {signal.Signals(signal_number).name}. {left}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by arguments, not by message: the error travels between processes."""
        values = {"checkpoint": self.checkpoint, "model_folder": self.model_folder}
        return functools.partial(Interrupted, self.signal_number, **values), ()

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as in shells."""
        return 128 + self.signal_number


def is_panic(error: BaseException) -> bool:
    """Return whether a library written in Rust (tokenizers, safetensors) panicked over a bug or a damaged file.

    The exception's type cannot be imported, and is not an ``Exception``.
    """
    return (type(error).__module__, type(error).__name__) == ("pyo3_runtime", "PanicException")


def panic_problem(error: BaseException) -> str:
    """Return the sentence about a panic."""
    words = str(error).strip().partition("\n")[0]
    return (
        f"A library written in Rust, such as tokenizers or safetensors, panicked: {words}. Most often an input file "
        "is damaged: download or make tokenizer.json and the weights again, or install another version of the library."
    )


_OF_THE_MACHINE = {
    errno.EACCES, errno.EPERM, errno.EROFS,
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG,
    errno.ENAMETOOLONG, errno.ELOOP, errno.EIO,
}  # fmt: skip
"""Error numbers that the owner of the machine has to deal with. A missing file is not among them: it may be our bug."""


def machine_problem(error: OSError) -> str | None:
    """Return the sentence about a file or folder that the system refuses to read or write; None for other errors."""
    if error.errno not in _OF_THE_MACHINE or error.filename is None:
        return None
    return (
        f"{error.filename} cannot be read or written: {error.strerror}. Name another path, or make this one "
        "accessible."
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a suffix with the closest known names, such as `` Did you mean `packing`?``; empty if none is close."""
    others = {other.lower(): other for other in known if other != name}
    close = [others[match] for match in difflib.get_close_matches(name.lower(), others, n=3, cutoff=0.6)]
    return f" Did you mean {' or '.join(f'`{match}`' for match in close)}?" if close else ""
