"""Answers to a program that asks for an unknown value, by rules that its author can rely on.

- Numbers are finite (``finite_values.py``).
- A check passes: where one answer leads straight to a ``raise``, as in ``assert`` and ``if bad: raise``, the program
  gets the other.
- Otherwise the answer is no, and the report names the line that asked: the program may take another path on a GPU.
- Numbers read as 0.0, integers as 1.

A ``while`` loop that only such an answer can end is stopped, with an error that names its line.
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import torch

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.notebook_cells import is_of_cell
from lowmem_ft.foundation.packages import own_folder
from lowmem_ft.virtual_gpu.values.branch_bytecode import answer_that_passes, innermost_loop, returns_answer

MOST_ROUNDS = 1000
"""Times that a ``while`` loop may ask for one unknown value: more will not end it."""

_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARIES = (
    own_folder("lowmem_ft"),
    str(Path(_TORCH).parent) + os.sep,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
)
_MACHINERY = (
    *map(own_folder, ("lowmem_ft.virtual_gpu", "lowmem_ft.foundation.upstream")),
    *(_TORCH + "_compile.py", _TORCH + "_ops.py", _TORCH + "_dynamo" + os.sep),
)
_MODES = frozenset({"__torch_dispatch__", "__torch_function__"})
_COMPARES = _TORCH + "testing" + os.sep
"""Folder of ``torch.testing``, whose ``assert_close`` and the like only raise."""

_LONGEST_SOURCE = 60

_Asked = dict[tuple[int, int, int], int]
"""Number of times a call of a function has asked, by the first instruction of its loop and the line that asked."""


class Questions:
    """Answers for values that are not known.

    Args:
        say: called with each line that gets an answer which may be wrong.

    Attributes:
        say: the same function.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._asked_in: dict[int, _Asked] = {}

    def answer(self, dtype: torch.dtype, *, is_in_forward: bool = False) -> float | int | bool:
        """Return a stand-in for one value.

        Args:
            dtype: type of the tensor that holds it.
            is_in_forward: whether a module's forward asks, so that shapes may follow from it.

        Raises:
            UserError: in an infinite loop.
        """
        self._count_round()
        passing = _passing_answer()
        is_number = dtype.is_floating_point or dtype.is_complex
        if passing is not None:
            return float(passing) if is_number else passing if dtype == torch.bool else int(passing)
        if is_number:
            return 0.0
        if dtype == torch.bool:
            self.say(f"{asking_line()}: a boolean that a trace does not have was taken as False")
            return False
        if is_in_forward:
            self.say(f"{asking_line()}: an integer that a trace does not have was read as 1")
        return 1

    def _count_round(self) -> None:
        frames = asking_frames()
        asking = next(frames, None)
        frame = asking
        while asking is not None and frame is not None:
            loop = innermost_loop(frame.f_code, frame.f_lasti)
            if loop is not None:
                if not loop.is_bounded:
                    self._count(frame, (loop.first, id(asking.f_code), asking.f_lasti))
                return
            frame = next(frames, None)

    def _count(self, frame: FrameType, place: tuple[int, int, int]) -> None:
        if not frame.f_trace_opcodes:  # another call; a debugger's flag is all that fits on a frame
            frame.f_trace_opcodes = True
            self._asked_in[id(frame)] = {}
        asked = self._asked_in.setdefault(id(frame), {})
        asked[place] = asked.get(place, 0) + 1
        if asked[place] > MOST_ROUNDS:
            raise UserError(
                f"A `while` loop must end without values, as a trace has none: at {asking_line()} one has asked for "
                f"them {MOST_ROUNDS} times. Give it a number of rounds, such as `max_new_tokens` for generation, or "
                "train for a few steps: three are enough."
            )


def asking_frames() -> Iterator[FrameType]:
    """Yield the running calls, from the one that asks outwards, without those of this package and of torch's modes."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_MACHINERY) and code.co_name not in _MODES:
            yield frame
        frame = frame.f_back


def asking_line() -> str:
    """Return the line of the user's program that asks, with the line of the library in between."""
    asking: FrameType | None = None
    for frame in asking_frames():
        asking = asking or frame
        if not is_of_library(frame.f_code.co_filename):
            place = _place(frame)
            return f"{place}{_source(frame)}" if frame is asking else f"{_place(asking)}, called from {place}"
    return "a line without source" if asking is None else _place(asking)


@functools.cache
def is_of_library(file: str) -> bool:
    """Return whether code is in this package, in an installed one, or comes with Python."""
    return file.startswith(_LIBRARIES)


def _shown_file(file: str) -> str:
    """Return a file's name for people: relative to the packages' folder or to the working directory where possible."""
    path = Path(file)
    for folder in (Path(_TORCH).parent, Path.cwd()):
        if path.is_relative_to(folder):
            return str(path.relative_to(folder))
    return file


def shown_line(file: str, line: int | None) -> str:
    """Return a line's place for people: ``train.py:12``, or ``train.ipynb, cell 4, line 2`` in a notebook."""
    return f"{_shown_file(file)}, line {line}" if is_of_cell(file) else f"{_shown_file(file)}:{line}"


def _place(frame: FrameType) -> str:
    return shown_line(frame.f_code.co_filename, frame.f_lineno)


def _source(frame: FrameType) -> str:
    source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    if not source:
        return ""
    return f" `{source if len(source) <= _LONGEST_SOURCE else source[:_LONGEST_SOURCE] + '...'}`"


def _passing_answer() -> bool | None:
    for frame in asking_frames():
        if frame.f_code.co_filename.startswith(_COMPARES):
            return True
        if not returns_answer(frame.f_code, frame.f_lasti):
            return answer_that_passes(frame.f_code, frame.f_lasti)
    return None
