"""Where a run writes down its numbers: ``metrics.jsonl`` and the trackers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowmem_ft.training.run.run_folder import RunFolder
from lowmem_ft.training.runtime import RunRuntime


@dataclass(frozen=True)
class RunMetrics:
    """The main process writes the file; the runtime knows who tells the trackers.

    Args:
        folder: of the run.
        runtime: of this process.
    """

    folder: RunFolder
    runtime: RunRuntime

    def write(self, record: dict[str, Any], *, to_trackers: bool = False) -> None:
        """One line.

        Args:
            record: its ``step`` among other values.
            to_trackers: whether they are told as well.

        Raises:
            CheckpointError: if the file cannot be written.
        """
        if self.runtime.is_main:
            self.folder.write_metrics(record)
        if to_trackers:
            self.runtime.log(record)
