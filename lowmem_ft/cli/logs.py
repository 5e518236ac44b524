"""Where log lines of a command go."""

from __future__ import annotations

import logging

import rich
from rich.console import ConsoleRenderable
from rich.logging import RichHandler

from lowmem_ft.reports.prose import Prose
from lowmem_ft.starting import is_main_process


def set_up_logging() -> None:
    """Send log lines to stderr: ours from INFO, other libraries' from WARNING, other processes' from ERROR.

    The handler shares ``rich.get_console()`` with the progress bars, so that no line cuts through a bar.
    """
    rich.reconfigure(stderr=True)
    console = rich.get_console()
    handler: logging.Handler
    if console.is_terminal:
        handler = TerminalHandler(console=console, show_path=False, log_time_format="[%X]")
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:  # a file or a pipe: rich would wrap each line at 80 columns
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    speaks = is_main_process()
    logging.basicConfig(level=logging.WARNING if speaks else logging.ERROR, handlers=[handler], force=True)
    logging.getLogger("lowmem_ft").setLevel(logging.INFO if speaks else logging.ERROR)


class TerminalHandler(RichHandler):
    """Breaks lines as the reports do, where nothing is copied across."""

    def render_message(self, record: logging.LogRecord, message: str) -> ConsoleRenderable:  # noqa: D102
        return Prose(message, highlighter=self.highlighter)


def take_over_library_logs() -> None:
    """Call after the libraries are imported: each line once, in our form.

    huggingface_hub and datasets give their loggers a handler of their own on import, beside ours at the root. The
    readers of datasets log an error and then raise it, and what is raised reaches the user in our words.
    """
    for library in ("huggingface_hub", "datasets"):
        logging.getLogger(library).handlers.clear()
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
