"""A sign of life on a terminal, for work of more than a moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

_SPINNER_CELLS = 3
"""The spinner, a space, and the last column, which some terminals wrap at."""


@contextlib.contextmanager
def progress_line(doing: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is being done, and goes when it is; nothing where stderr is a file or a pipe.

    Args:
        doing: what the line says first.

    Yields:
        A function that changes what it says.
    """
    import rich
    from rich.text import Text

    console = rich.get_console()  # that of the log, so that neither cuts through the other
    if not console.is_terminal:
        yield lambda text: None
        return

    def line(text: str) -> Text:
        """One line: a second one would stay where it is when the next is drawn."""
        whole = Text(f"{text} ...")
        whole.truncate(console.width - _SPINNER_CELLS, overflow="ellipsis")
        return whole

    with console.status(line(doing)) as status:
        yield lambda text: status.update(line(text))
