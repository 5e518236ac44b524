"""Refusal of what an estimate of a script cannot follow: questions to a keyboard, and other processes that train."""

from __future__ import annotations

import builtins
import contextlib
import io
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch.multiprocessing

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.upstream.import_hooks import wrap_when_imported
from lowmem_ft.foundation.upstream.patches import replace


class _ScriptRefusal(UserError):
    """The script does what an estimate cannot follow."""


def refuse_what_cannot_be(undo: contextlib.ExitStack) -> None:
    """Refuse both until a stack is undone."""
    replace(undo, builtins, "input", _refuse_to_ask)
    replace(undo, sys, "stdin", _NoKeyboard())
    for module in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        replace(undo, module, "start_processes", _refuse_processes)
        replace(undo, module, "spawn", _refuse_processes)
    for owner in ("launchers", ""):
        wrap_when_imported(undo, "accelerate", owner, "notebook_launcher", _launch_here)


def _refuse_to_ask(*args: Any) -> NoReturn:
    raise _ScriptRefusal(
        "A script that is estimated gets no input, but it called input() or read stdin. Pass the values as arguments, "
        "after `--`."
    )


class _NoKeyboard(io.TextIOBase):
    def readable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def read(self, size: int | None = -1) -> str:
        _refuse_to_ask()

    readline = read  # type: ignore[assignment]


def _launch_here(
    launch: object, function: Callable[..., Any], args: Any = (), num_processes: Any = None, **kwargs: Any
) -> None:
    if num_processes not in (None, 0, 1):
        _refuse_processes()
    function(*args)


def _refuse_processes(*args: Any, **kwargs: Any) -> NoReturn:
    raise _ScriptRefusal(
        "A script is estimated in one process, on one GPU, but it starts other processes to train in. Call their "
        "function from a separate script, in one process."
    )
