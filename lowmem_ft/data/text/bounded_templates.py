"""A limit on the text that a chat template writes, whose loops would otherwise fill the machine's memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2

from lowmem_ft.foundation.upstream.patches import replace, wrap

MOST_CHARS = 2**27
"""Characters of one conversation: more than a hundred novels, and less than 1 GiB as Python keeps them."""

CHARS_OF_PIECE = 8
"""Characters that each piece of the text counts for in addition: a loop may write empty ones without an end."""

_patching = threading.RLock()
"""Held while a template is rendered: the limit is a patch of jinja's classes."""


@contextlib.contextmanager
def bounded_templates() -> Iterator[None]:
    """Raise a ``TemplateError`` once a template has written more than :data:`MOST_CHARS` characters.

    A whole template and its parts that are kept in a variable, macros and ``{% generation %}`` blocks count each for
    themselves. Strings that one expression multiplies are not looked at.
    """
    with _patching, contextlib.ExitStack() as undo:
        replace(undo, jinja2.Environment, "concat", staticmethod(_joined))
        wrap(undo, jinja2.Template, "generate", _generated)
        yield


def _joined(pieces: Iterable[str]) -> str:
    return "".join(_bounded(pieces))


def _generated(generate: Callable[..., Iterator[str]], *args: Any, **kwargs: Any) -> Iterator[str]:
    return _bounded(generate(*args, **kwargs))


def _bounded(pieces: Iterable[str]) -> Iterator[str]:
    length = 0
    for piece in pieces:
        length += len(piece) + CHARS_OF_PIECE
        if length > MOST_CHARS:
            raise jinja2.TemplateError(
                f"it has written more than {MOST_CHARS:,} characters, as a loop without an end would"
            )
        if piece:
            yield piece
