"""Capture of this package's log records in a block: a report shows them instead of the log."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def log_heard(level: int, hear: Callable[[logging.LogRecord], object]) -> Iterator[None]:
    """Call ``hear`` with what is logged in a block, from ``level`` on, and write nothing of it.

    Args:
        level: lowest level that is heard.
        hear: takes each record.
    """
    log, handler = logging.getLogger("lowmem_ft"), logging.Handler(level)
    handler.emit = hear  # type: ignore[method-assign]
    before = log.propagate, log.level
    log.addHandler(handler)
    log.propagate = False
    log.setLevel(level)
    try:
        yield
    finally:
        log.propagate, log.level = before
        log.removeHandler(handler)
