"""Lines of a given width that break only between words: whatever a user may copy stays whole, however long.

A word may be a setting, a path or an address; a command in backticks counts as one word if it fits on a line.
"""

from __future__ import annotations

import re
import shlex
import textwrap
import unicodedata
from collections.abc import Sequence

_GLUE = "\x00"
"""Placeholder for a blank inside a command while lines are filled."""

_SECOND_HALF = "\x01"
"""Placeholder after a character that takes two columns, such as a Chinese one, while lines are filled."""


def filled(text: str, width: int, *, indent: str = "", hanging: str | None = None) -> list[str]:
    """Return the lines of a text; a line break in the text is kept.

    Args:
        text: one line or several.
        width: columns of a line; at least one.
        indent: prefix of each line of the text.
        hanging: prefix of its continuation lines; None: the same.

    Returns:
        The lines; none is wider than ``width``, except for a longer word.
    """
    hanging = indent if hanging is None else hanging
    room = width - max(len(indent), len(hanging))
    lines: list[str] = []
    for line in text.splitlines():
        lines += textwrap.wrap(
            _glued(line, room),
            max(1, width),
            initial_indent=indent,
            subsequent_indent=hanging,
            break_on_hyphens=False,
            break_long_words=False,
            expand_tabs=False,
            replace_whitespace=False,
        ) or [""]
    return [line.replace(_GLUE, " ").replace(_SECOND_HALF, "") for line in lines]


def longest_word(text: str, room: int) -> int:
    """Return the columns of the widest piece that :func:`filled` does not break.

    Args:
        text: any text.
        room: columns available.
    """
    return max(map(len, _glued(text, room).split()), default=0)


def shell_lines(command: Sequence[str], width: int) -> list[str]:
    """Return a command in lines that a shell joins, the first of them indented by two columns.

    Args:
        command: its words; words that a shell would split or expand are quoted.
        width: columns of a line, if its longest word fits.
    """
    words = " ".join(shlex.quote(word).replace(" ", _GLUE) for word in command)
    *before, last = filled(words, width - len(" \\"), indent="  ", hanging="      ")
    return [*(f"{line} \\" for line in before), last]


def _glued(text: str, room: int) -> str:
    """Return the text with one character per column, and with placeholders for blanks in commands that fit."""
    if not text.isascii():
        text = "".join(
            char + _SECOND_HALF * (unicodedata.east_asian_width(char) in ("W", "F")) for char in text
        )

    def glue(command: re.Match[str]) -> str:
        return command[0].replace(" ", _GLUE) if len(command[0]) <= room else command[0]

    return re.sub(r"`[^`\n]*`\S*", glue, text)
