"""Lines of a width that break only between words: what is to be copied stays whole, however long.

A word may be a setting, a path or an address; a command in backticks counts as one as long as it fits on a line.
"""

from __future__ import annotations

import re
import shlex
import textwrap
import unicodedata
from collections.abc import Sequence

_GLUE = "\x00"
"""Stands for a blank inside of a command while lines are filled."""

_SECOND_HALF = "\x01"
"""Stands behind a character that takes two columns, such as those of Chinese, while lines are filled."""


def filled(text: str, width: int, *, indent: str = "", hanging: str | None = None) -> list[str]:
    """The lines of a text; one that it begins by itself stays one.

    Args:
        text: of one line or several.
        width: columns of a line; at the least one.
        indent: what each line of the text begins with.
        hanging: what its further lines begin with; None: the same.

    Returns:
        The lines, none wider than that but for a word that is.
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
        ) or [""]
    return [line.replace(_GLUE, " ").replace(_SECOND_HALF, "") for line in lines]


def longest_word(text: str, room: int) -> int:
    """Columns of the widest piece that :func:`filled` does not break.

    Args:
        text: any.
        room: columns that there are at most.
    """
    return max(map(len, _glued(text, room).split()), default=0)


def shell_lines(command: Sequence[str], width: int, *, indent: str = "  ") -> list[str]:
    """A command in lines that a shell takes together.

    Args:
        command: its words; those that a shell would take apart or expand are quoted.
        width: columns of a line, if its longest word has room there.
        indent: what the first line begins with; the others stand four columns further in.
    """
    words = " ".join(shlex.quote(word).replace(" ", _GLUE) for word in command)
    *before, last = filled(words, width - len(" \\"), indent=indent, hanging=f"{indent}    ")
    return [*(f"{line} \\" for line in before), last]


def _glued(text: str, room: int) -> str:
    """The text, a column for each character, and commands in backticks without blanks where they have room."""
    if not text.isascii():
        text = "".join(
            char + _SECOND_HALF * (unicodedata.east_asian_width(char) in ("W", "F")) for char in text
        )

    def glue(command: re.Match[str]) -> str:
        return command[0].replace(" ", _GLUE) if len(command[0]) <= room else command[0]

    return re.sub(r"`[^`\n]*`\S*", glue, text)
