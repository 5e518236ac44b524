"""Processes that estimate, next to one that trains or searches, and how many there may be.

A virtual GPU changes torch for its whole process: once ``vgpu`` is registered, torch takes it for the machine's
accelerator, in pinned memory and in barriers too. Host memory that a trace allocates would count towards the run's own
peak. A process that is about to train therefore estimates elsewhere; it also reads data while that process imports its
libraries.
"""

from __future__ import annotations

import os

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.system.child_process import ChildProcess
from lowmem_ft.foundation.system.cores import usable_cores

PROCESSES_VARIABLE = "LOWMEM_FT_TRACE_PROCESSES"
"""The most processes that make traces at once; ``1``: one process makes all. Unset: one per core."""


class EstimatingProcess(ChildProcess):
    """A child process for estimates, which says here that a trace takes long.

    Args:
        imports: see :class:`ChildProcess`; what estimates, by default.
    """

    def __init__(self, imports: str = "lowmem_ft.planning.estimator.estimate") -> None:
        super().__init__(imports=imports, warnings_of="lowmem_ft.planning.estimator.traces.tracing")


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
