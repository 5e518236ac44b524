"""Lines of a program at which the host waits for the device."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from lowmem_ft.foundation.packages import own_folder
from lowmem_ft.virtual_gpu.calls.work import WorkLog
from lowmem_ft.virtual_gpu.values.questions import asking_frames, shown_file

_NOT_THE_PROGRAM = (
    str(Path(torch.__file__).parent),
    *map(own_folder, ("lowmem_ft.planning.rehearsal", "lowmem_ft.planning.estimator")),
)
"""Folders whose lines only replace those of the program, or are called by them."""


class HostWaits:
    """Counts of host waits in a log of work, by the line that waits.

    Args:
        work: the log, whose waits are counted from now on.
    """

    def __init__(self, work: WorkLog) -> None:
        self._counts: Counter[str] = Counter()
        work.on_host_wait = self._count

    def take(self) -> Counter[str]:
        """Return the waits since the last call, as ``file:line``."""
        counts, self._counts = self._counts, Counter()
        return counts

    def _count(self, times: int) -> None:
        for frame in asking_frames():
            if not frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
                self._counts[f"{shown_file(frame.f_code.co_filename)}:{frame.f_lineno}"] += times
                return
        self._counts["a line without source code"] += times
