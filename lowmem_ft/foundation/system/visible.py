"""Text of other people's files, made safe to show."""

from __future__ import annotations

import re

_HIDDEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f"  # controls except the line break: a terminal obeys them
    "\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # no width, or another direction
    "\U000e0000-\U000e007f"  # tags: invisible copies of ASCII
    "\ud800-\udfff]"  # halves of characters, which cannot be written
)
_OUR_MARKS = re.compile("[⟦⟧]")


def visible(text: str) -> str:
    r"""Return a text with each character that a terminal would obey or hide written as an escape, such as ``\x1b``.

    Line breaks stay, and so do the joiners of emoji and of Persian; our own marks ``⟦`` and ``⟧`` are escaped, too.
    """
    return _OUR_MARKS.sub(_escape, escape_hidden(text))


def escape_hidden(text: str) -> str:
    """Return a text with the same escapes, and our own marks as they are: for lines that this package marks itself."""
    return _HIDDEN.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
