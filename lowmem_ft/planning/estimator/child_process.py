"""Estimates and plans made in a separate process, next to one that trains.

A virtual GPU changes torch for its whole process: once ``vgpu`` is registered, torch takes it for the machine's
accelerator, in pinned memory and in barriers too. Host memory that a trace allocates would count towards the run's own
peak. A process that is about to train therefore estimates elsewhere; it also reads data while that process imports its
libraries.
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

import lowmem_ft
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import UserError, is_panic, panic_problem
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.system.launch_variables import LAUNCH_VARIABLES
from lowmem_ft.planning.estimator.estimate import estimate_memory
from lowmem_ft.planning.estimator.traces import tracing
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.recipe import Recipe

logger = logging.getLogger(__name__)

_RESULT, _ERROR, _PROGRESS, _WARNING = "result", "error", "progress", "warning"


_PROGRAM = """
import sys
sys.path[:] = {path!r}
from lowmem_ft.foundation.system.garbage_collector import libraries_imported
with libraries_imported():
    from lowmem_ft.planning.estimator.child_process import serve
serve()
"""
"""Code of the process, run without ``-m``, which would import a user's own ``datasets.py`` from the current folder."""


class ChildFailedError(Exception):
    """The other process could not start, ended without an answer, or ended with an error that is not a user error.

    The message ends with the last line that the process printed.
    """


class EstimatingProcess(contextlib.AbstractContextManager["EstimatingProcess"]):
    """A process that answers one question after the other, from the creation of this object until :meth:`close`.

    Ask, do something else, then take the answer. Both ends run the same files with the same Python.

    Raises:
        ChildFailedError: if the system cannot start a process, for lack of memory.
    """

    def __init__(self) -> None:
        try:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - close() closes it
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(path=_module_path())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=_environment(os.environ),
            )
        except OSError as error:
            raise ChildFailedError(f"no process could be started: {error}") from error

    def ask(self, function: Callable[..., Any], *arguments: Any, tells_progress: bool = False) -> None:
        """Call a function in the other process.

        Args:
            function: a function that can be imported by its name, such as :func:`lowmem_ft.estimate_memory`.
            *arguments: its arguments. That process cannot see this machine's own GPU: pass its specification.
            tells_progress: whether the function takes an argument ``on_progress``, a function that it calls with its
                progress.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process is gone, as answer() will say
            pickle.dump((function, arguments, tells_progress), self._process.stdin)
            self._process.stdin.flush()

    def answer(self, on_progress: Callable[[Any], None] = lambda progress: None) -> Any:
        """Wait for the answer to the last question.

        Args:
            on_progress: called with each progress value that the function reports.

        Raises:
            UserError: if the function raised it.
            ChildFailedError: if the process failed.
        """
        assert self._process.stdout is not None
        while True:
            try:
                kind, answer = pickle.load(self._process.stdout)  # written by our own code, in serve()
            except (EOFError, pickle.UnpicklingError):
                raise ChildFailedError(self._last_words()) from None
            if kind == _ERROR:
                raise answer
            if kind == _RESULT:
                return answer
            if kind == _WARNING:
                logger.warning("%s", answer)
            else:
                on_progress(answer)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # a question that the process never read
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
    return [*map(str, sys.path), str(Path(lowmem_ft.__file__).parents[1])]


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment, without its GPUs and its ranks."""
    environment = {name: value for name, value in own.items() if name not in LAUNCH_VARIABLES}
    return environment | {"CUDA_VISIBLE_DEVICES": ""}


def serve() -> None:
    """Write answers to the original standard output, so that printed text never gets between them."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)

        one_by_one = threading.Lock()

        def say(kind: str, value: Any) -> None:
            with one_by_one:
                pickle.dump((kind, value), answers)
                answers.flush()

        logging.getLogger(tracing.__name__).addHandler(_Teller(say))
        while True:
            try:
                function, arguments, tells_progress = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            progress = {"on_progress": functools.partial(say, _PROGRESS)} if tells_progress else {}
            try:
                say(_RESULT, function(*arguments, **progress))
            except UserError as error:
                say(_ERROR, error)
            except BaseException as error:
                if not is_panic(error):
                    raise
                say(_ERROR, UserError(panic_problem(error)))


class _Teller(logging.Handler):
    """Forwards warnings logged here to the parent, from a thread next to the trace: that the trace takes long."""

    def __init__(self, say: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(_WARNING, record.getMessage())


def estimate_without_timeline(recipe: Recipe, gpu: str | Gpu) -> MemoryEstimate:
    """Call :func:`lowmem_ft.estimate_memory` and drop the single allocations, which are a lot of data to hand over."""
    return estimate_memory(recipe, gpu, kept=KeptTraces.of_user()).without_timeline()
