"""Processes that a script starts or ends: they print nothing here, and only the first makes an estimate."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lowmem_ft.foundation.system import signals
from lowmem_ft.foundation.upstream.patches import wrap

_TERMINAL = (1, 2)
"""File descriptors that other processes inherit."""


def other_processes_kept_apart(undo: contextlib.ExitStack) -> None:
    """Keep them apart until a stack is undone."""
    wrap(undo, subprocess.Popen, "__init__", _start_quietly)
    for owner, name in ((os, "system"), (multiprocessing.util, "spawnv_passfds")):
        wrap(undo, owner, name, _run_quietly)
    wrap(undo, os, "_exit", partial(_end_script, os.getpid()))


@contextlib.contextmanager
def only_this_process() -> Iterator[None]:
    """End a process that a block has forked, where the block ends: the first one continues alone."""
    first = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != first:
            os._exit(0)


def _start_quietly(start: Callable[..., None], process: Any, *args: Any, **kwargs: Any) -> None:
    for at, name in enumerate(("stdout", "stderr"), start=4):
        if len(args) <= at and kwargs.get(name) is None:
            kwargs[name] = subprocess.DEVNULL
    start(process, *args, **kwargs)


def _run_quietly(run: Callable[..., Any], *args: Any) -> Any:
    kept = [os.dup(descriptor) for descriptor in _TERMINAL]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for descriptor in _TERMINAL:
            os.dup2(nowhere, descriptor)
        return run(*args)
    finally:
        for descriptor, before in zip(_TERMINAL, kept, strict=True):
            os.dup2(before, descriptor)
            os.close(before)
        os.close(nowhere)


def _end_script(first: int, end: Callable[[int], None], code: int) -> None:
    """End the script as ``sys.exit`` does: without this process, there would be no answer."""
    if os.getpid() != first or _is_signalled():
        end(code)
    raise SystemExit(code)


def _is_signalled() -> bool:
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != signals.__name__:
        frame = frame.f_back
    return frame is not None
