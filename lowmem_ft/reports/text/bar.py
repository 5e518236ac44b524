"""Bars in a cell of a table."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text


class Bar:
    """A share of the available width, in eighths of a character; in whole ``#`` where blocks cannot be written.

    Args:
        share: between 0 and 1.
        colour: style of the bar.
    """

    def __init__(self, share: float, colour: str) -> None:
        self._share = min(1.0, share)
        self._colour = colour

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        full, eighths = divmod(round(self._share * options.max_width * 8), 8)
        text = "█" * full + " ▏▎▍▌▋▊▉"[eighths].strip()
        if options.ascii_only:
            text = "#" * round(self._share * options.max_width)
        yield Text(text, self._colour)
