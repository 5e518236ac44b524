"""Destination and form of a command's log lines."""

from __future__ import annotations

import logging
from datetime import datetime

import rich
from rich.logging import RichHandler
from rich.text import Text

from lowmem_ft.foundation.system.launch_variables import is_main_process
from lowmem_ft.foundation.system.visible import escape_hidden
from lowmem_ft.reports.text.document import Pairs


def set_up_logging() -> None:
    """Send log lines to stderr: ours from INFO, other libraries' from WARNING, other ranks' from ERROR.

    The handler shares ``rich.get_console()`` with the progress bars, so that no line cuts through a bar.
    """
    rich.reconfigure(stderr=True)
    console = rich.get_console()
    handler: logging.Handler
    if console.is_terminal:
        handler = _TerminalHandler(console=console)
        handler.setFormatter(_Visible("%(message)s"))
    else:  # a file or a pipe: rich would wrap each line at 80 columns
        handler = logging.StreamHandler()
        handler.setFormatter(_Visible("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    speaks = is_main_process()
    logging.basicConfig(level=logging.WARNING if speaks else logging.ERROR, handlers=[handler], force=True)
    logging.getLogger("lowmem_ft").setLevel(logging.INFO if speaks else logging.ERROR)


class _Visible(logging.Formatter):
    """Formats log lines, which may quote names and paths of other people, without characters that a terminal obeys."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_hidden(super().format(record))


class _TerminalHandler(RichHandler):
    """Handler that lays out lines as reports do: next to their time and level, with paths whole, for copying."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            time = datetime.fromtimestamp(record.created).strftime("[%X]")
            shown = " " * len(time) if time == self._last_time else time
            self._last_time = time
            message = Text(self.format(record), "log.message")
            if self.highlighter is not None:
                self.highlighter.highlight(message)
            before = Text.assemble((shown, "log.time"), " ", self.get_level_text(record))
            self.console.print(Pairs([(before, message)], indent=0, gap=1), soft_wrap=True)
        except Exception:
            self.handleError(record)

    _last_time: str | None = None
