"""A child process that calls functions for this one, in an interpreter of its own.

Functions and answers are pickled through its standard input and output. ``multiprocessing`` does not start it: that
would import the user's script once more, whatever the script does when it is imported.

``close()`` ends it, whatever it is doing. A Ctrl-C in a terminal reaches both processes; the child ends, and its
traceback is dropped. If its parent dies, it ends once it has nothing to do. If it dies itself, the parent learns the
exit code and the last line. Its memory has no bound of its own: a caller that starts several counts what is free
(``planning/planner/search/prefetch.py``), and a function that it calls may set a limit (``ui/answering.py``).

The package starts other processes where this one is no use: a fork, for a trace that begins at once from what is in
memory (``planning/estimator/traces/forked_trace.py``); a fork with the same terminal, for a user's program
(``cli/processes/isolated_process.py``); a launcher (``cli/processes/cpu_launch.py``).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lowmem_ft.foundation.errors import UserError, is_panic, panic_problem
from lowmem_ft.foundation.system.launch_variables import LAUNCH_VARIABLES

_RESULT, _ERROR, _CALLBACK, _WARNING = "result", "error", "callback", "warning"


_PROGRAM = """
import importlib, sys
sys.path[:] = {path!r}
from lowmem_ft.foundation.system.garbage_collector import libraries_imported
with libraries_imported():
    importlib.import_module({imports!r})
from lowmem_ft.foundation.system.child_process import serve
serve({warnings_of!r})
"""
"""Code of the process, run without ``-m``, which would import a user's own ``datasets.py`` from the current folder."""


class ChildFailedError(Exception):
    """The child could not start, ended without an answer, or ended with an error that is not a user error.

    The message ends with the last line that the child printed.
    """


class ChildProcess(contextlib.AbstractContextManager["ChildProcess"]):
    """A process that makes one call after the other, from the creation of this object until :meth:`close`.

    Both ends run the same files with the same Python. The child sees no GPU, and belongs to no launch.

    Args:
        imports: name of a module that it imports at once, before the first call.
        warnings_of: name of the logger whose warnings there are logged here.

    Raises:
        ChildFailedError: if the system cannot start a process, for lack of memory.
    """

    def __init__(self, *, imports: str, warnings_of: str) -> None:
        program = _PROGRAM.format(path=_module_path(), imports=imports, warnings_of=warnings_of)
        self._logger = logging.getLogger(warnings_of)
        try:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - close() closes it
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=_environment(os.environ),
            )
        except OSError as error:
            raise ChildFailedError(f"no process could be started: {error}") from error

    def call(self, function: Callable[..., Any], *arguments: Any, **callbacks: Callable[..., object]) -> Any:
        """Call a function there, and wait for its answer.

        Args:
            function: a function that can be imported by its name, such as :func:`lowmem_ft.estimate_memory`.
            *arguments: its arguments. The child cannot see this machine's own GPU: pass its specification.
            **callbacks: functions of this process that it calls by these names, such as ``on_progress``; what they
                return does not reach it.

        Raises:
            UserError: if the function raised it.
            ChildFailedError: if the child failed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the child is gone, as reading its answer will say
            pickle.dump((function, arguments, tuple(callbacks)), self._process.stdin)
            self._process.stdin.flush()
        while True:
            try:
                kind, value = pickle.load(self._process.stdout)  # written by our own code, in serve()
            except (EOFError, pickle.UnpicklingError):
                raise ChildFailedError(self._last_words()) from None
            if kind == _ERROR:
                raise value
            if kind == _RESULT:
                return value
            if kind == _WARNING:
                self._logger.warning("%s", value)
            else:
                name, values = value
                callbacks[name](*values)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # a call that the child never read
                stream.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return ": ".join([f"it ended with exit code {self._process.returncode}", *lines[-1:]])


def _module_path() -> list[str]:
    """Return the folders where this process finds modules, and this very package if it was found elsewhere."""
    return [*map(str, sys.path), str(Path(__file__).parents[3])]


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment, without its GPUs and its ranks."""
    environment = {name: value for name, value in own.items() if name not in LAUNCH_VARIABLES}
    return environment | {"CUDA_VISIBLE_DEVICES": ""}


def serve(warnings_of: str) -> None:
    """Write answers to the original standard output, so that printed text never gets between them."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)

        one_by_one = threading.Lock()

        def say(kind: str, value: Any) -> None:
            with one_by_one:
                pickle.dump((kind, value), answers)
                answers.flush()

        def call_back(name: str, *values: Any) -> None:
            say(_CALLBACK, (name, values))

        warnings = logging.Handler(logging.WARNING)
        warnings.emit = lambda record: say(
            _WARNING, record.getMessage()
        )  # at times from a thread next to the call
        logging.getLogger(warnings_of).addHandler(warnings)
        while True:
            try:
                function, arguments, callbacks = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            try:
                told = {name: functools.partial(call_back, name) for name in callbacks}
                say(_RESULT, function(*arguments, **told))
            except UserError as error:
                say(_ERROR, error)
            except BaseException as error:
                if not is_panic(error):
                    raise
                say(_ERROR, UserError(panic_problem(error)))
