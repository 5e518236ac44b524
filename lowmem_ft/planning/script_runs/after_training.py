"""The end of a script, once its trainer has trained: the models that it then loads or merges need memory, too.

It is seen up to where it would concern others, or continue for long: it was written to run once, after a real training.
An error there is said, and costs nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.foundation.upstream.import_hooks import wrap_when_imported
from lowmem_ft.planning.script_runs.steps import Enough
from lowmem_ft.virtual_gpu.recording.code_places import PeakPlace
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine
from lowmem_ft.virtual_gpu.values.questions import is_of_library, shown_line

MOST_FORWARDS = 16
"""The most calls of a model: answers of hundreds of tokens, one a call, would take longer than the training."""

_HUB = "huggingface_hub"
_STARTS = "starts another process"
_STARTERS = frozenset({"lowmem_ft", "subprocess", "multiprocessing", "concurrent", "torch", "os"})
"""Packages through which a script starts processes."""

_ENDS = (
    ("subprocess", "Popen", "__init__", _STARTS),
    ("multiprocessing.process", "BaseProcess", "start", _STARTS),
    (
        "os",
        "",
        "system execv execve fork" if hasattr(os, "fork") else "system execv execve",
        _STARTS,
    ),
    ("os", "", "_exit abort kill", "ends its process"),
    ("socket", "socket", "connect connect_ex", "opens a connection"),
    ("http.client", "HTTPConnection", "putrequest", "sends a request"),
    ("socket", "socket", "bind", "waits for connections"),
    ("time", "", "sleep", "waits"),
    ("sqlite3", "", "connect", "opens a database"),
)
"""Module, class and functions, and what a script does by them."""


class AfterTraining:
    """Ends a script after its training, before it does what an estimate should not.

    Args:
        machine: the machine that the script runs on.
        peak: the peak of its memory so far.

    Attributes:
        has_begun: whether its trainer has trained.
    """

    def __init__(self, machine: TracingMachine, peak: PeakPlace) -> None:
        self._machine = machine
        self._peak = peak
        self._most_bytes_before = 0
        self.has_begun = False
        self._started_at = ""
        self._other_threads: set[threading.Thread] = set()
        self._depth = 0
        self._num_forwards = 0

    def apply(self, undo: contextlib.ExitStack) -> None:
        """Watch the code that runs from now on until the stack is undone."""
        for module, owner, names, does in _ENDS:
            for name in names.split():
                wrap_when_imported(undo, module, owner, name, functools.partial(self._call, does))
        for handle in (
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, always_call=True),
        ):
            undo.callback(handle.remove)

    def begin(self) -> None:
        """Take what runs from now on for code after the training."""
        self.has_begun = True
        self._other_threads = set(threading.enumerate()) - {threading.current_thread()}
        self._most_bytes_before = self._peak.most_bytes
        self._machine.attribution.starts_over()

    def in_words(self) -> str:
        """Return a note with the needs of training itself if the script needs more after it; else nothing."""
        if not self.has_begun or self._peak.most_bytes <= self._most_bytes_before:
            return ""
        before = format_bytes(self._most_bytes_before)
        return f"after training: the script needs more than while it trains, which takes {before}, allocated"

    def other_processes(self) -> str:
        """Return a note on steps in other processes, with the line that started one."""
        started = f", and it starts one at {self._started_at}" if self._started_at else ""
        return f"steps in other processes are not seen{started}"

    def end_before_it(self, does: str) -> None:
        """End the script if its training is over.

        Args:
            does: what it is about to do.

        Raises:
            Enough: if it is.
        """
        if self.has_begun:
            self._machine.say(f"after training: the script is seen up to where it {does}")
            raise Enough

    def _call(self, does: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_of_script = self.has_begun and threading.current_thread() not in self._other_threads
        if does == _STARTS and not self.has_begun:
            self._started_at = self._started_at or _own_line()
        if is_of_script and not _is_called_by(_HUB):  # which reads: what would write there does nothing
            self.end_before_it(does)
        return function(*args, **kwargs)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._num_forwards += self.has_begun and not self._depth
        if self._num_forwards > MOST_FORWARDS:
            self.end_before_it(f"calls a model for the {MOST_FORWARDS + 1}th time")
        self._depth += 1

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._depth -= 1


def _own_line() -> str:
    """Return the line of the script that starts a process; empty: a library does, for itself."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _STARTERS:
        frame = frame.f_back
    if frame is None or is_of_library(frame.f_code.co_filename) or frame.f_code.co_filename == "<string>":
        return ""
    return shown_line(frame.f_code.co_filename, frame.f_lineno)


def _is_called_by(library: str) -> bool:
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] != library:
        frame = frame.f_back
    return frame is not None
