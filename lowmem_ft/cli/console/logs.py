"""Destination and form of a command's log lines."""

from __future__ import annotations

import logging
from datetime import datetime

import rich
from rich.cells import cell_len
from rich.logging import RichHandler
from rich.text import Text

from lowmem_ft.reports.text.wrapping import filled
from lowmem_ft.system.launch_variables import is_main_process


def set_up_logging() -> None:
    """Send log lines to stderr: ours from INFO, other libraries' from WARNING, other ranks' from ERROR.

    The handler shares ``rich.get_console()`` with the progress bars, so that no line cuts through a bar.
    """
    rich.reconfigure(stderr=True)
    console = rich.get_console()
    handler: logging.Handler
    if console.is_terminal:
        handler = TerminalHandler(console=console)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:  # a file or a pipe: rich would wrap each line at 80 columns
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    speaks = is_main_process()
    logging.basicConfig(level=logging.WARNING if speaks else logging.ERROR, handlers=[handler], force=True)
    logging.getLogger("lowmem_ft").setLevel(logging.INFO if speaks else logging.ERROR)


class TerminalHandler(RichHandler):
    """Handler that breaks lines only between words, as reports do, so that a user can copy paths whole.

    A path wider than the message column begins further left; one wider than the terminal runs past its edge.
    """

    def emit(self, record: logging.LogRecord) -> None:  # noqa: D102
        try:
            self.console.print(self._text(record), soft_wrap=True)
        except Exception:
            self.handleError(record)

    def _text(self, record: logging.LogRecord) -> Text:
        time = datetime.fromtimestamp(record.created).strftime("[%X]")
        is_same = time == self._last_time
        self._last_time = time
        before = Text.assemble(
            (" " * len(time) if is_same else time, "log.time"), " ", self.get_level_text(record), " "
        )
        margin, width = before.cell_len, self.console.width
        for number, line in enumerate(filled(self.format(record), width - margin)):
            indent = max(0, min(margin, width - cell_len(line)))
            if number == 0 and indent < margin:
                before.rstrip()
            if number or indent < margin:
                before.append("\n" + " " * indent)
            message = Text(line, "log.message")
            if self.highlighter is not None:
                self.highlighter.highlight(message)
            before.append_text(message)
        return before

    _last_time: str | None = None


def take_over_library_logs() -> None:
    """Log each line of the libraries once, in our form; call this after they are imported.

    On import, huggingface_hub and datasets add handlers to their loggers, in addition to ours at the root. The readers
    of datasets log an error and then raise it, and we report what is raised in our own words.
    """
    for library in ("huggingface_hub", "datasets"):
        logging.getLogger(library).handlers.clear()
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
