"""A sign of life on a terminal, for work of more than a moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_line(doing: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is being done, and goes when it is; nothing where stderr is a file or a pipe.

    Args:
        doing: what the line says first.

    Yields:
        A function that changes what it says.
    """
    import rich

    console = rich.get_console()  # that of the log, so that neither cuts through the other
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(f"{doing} ...") as status:
        yield lambda text: status.update(f"{text} ...")
