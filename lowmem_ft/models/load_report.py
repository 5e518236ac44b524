"""transformers' report of a load, held back until it is known whether an error says the same."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator

_REPORT, _ROW = "LOAD REPORT", re.compile(r"^(\S+)\s*\|[^|\n]*CONVERSION", re.MULTILINE)


class HeldReport(logging.Filter):
    """Holds the table of missing and mismatched weights that ``from_pretrained`` logs."""

    def __init__(self) -> None:
        super().__init__()
        self._records: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is something else."""
        is_other = _REPORT not in record.getMessage()
        if not is_other:
            self._records.append(record)
        return is_other

    def log(self) -> None:
        """Log what was held."""
        for record in self._records:
            logging.getLogger(record.name).handle(record)

    @property
    def unconverted(self) -> list[str]:
        """The weights that could not be put together from the files' own."""
        return [name for record in self._records for name in _ROW.findall(record.getMessage())]


@contextlib.contextmanager
def report_held() -> Iterator[HeldReport]:
    """Keep transformers from logging its report within a block."""
    logger, report = logging.getLogger("transformers.modeling_utils"), HeldReport()
    logger.addFilter(report)
    try:
        yield report
    finally:
        logger.removeFilter(report)
