"""Progress line on a terminal, for work that takes more than a moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

_SPINNER_CELLS = 3
"""Columns for the spinner, a space, and the last column, at which some terminals wrap."""


@contextlib.contextmanager
def progress_line(doing: str) -> Iterator[Callable[[str], None]]:
    """Show a line on stderr while the block runs, then remove it; nothing if stderr is a file or a pipe.

    Args:
        doing: the first text of the line.

    Yields:
        A function that changes the text.
    """
    import rich
    from rich.text import Text

    console = rich.get_console()  # that of the log, so that neither cuts through the other
    if not console.is_terminal:
        yield lambda text: None
        return

    def line(text: str) -> Text:
        """Return one line, truncated: a second one would remain when the next is drawn."""
        whole = Text(f"{text} ...")
        whole.truncate(console.width - _SPINNER_CELLS, overflow="ellipsis")
        return whole

    with console.status(line(doing)) as status:
        yield lambda text: status.update(line(text))
