"""The number of processes that may estimate at once."""

from __future__ import annotations

import os

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.system.cores import usable_cores

PROCESSES_VARIABLE = "LOWMEM_FT_TRACE_PROCESSES"
"""The most processes that make traces at once; ``1``: one process makes all. Unset: one per core."""


def processes_at_once() -> int:
    """Return the most processes to use, by the cores that this process may use and ``LOWMEM_FT_TRACE_PROCESSES``.

    Raises:
        UserError: if that variable is not a number from 1.
    """
    asked = os.environ.get(PROCESSES_VARIABLE, "")
    if not asked:
        return usable_cores()
    if not (asked.isdecimal() and int(asked) >= 1):
        raise UserError(f"{PROCESSES_VARIABLE} is a number of processes, at least 1, got {asked!r}.")
    return min(usable_cores(), int(asked))
