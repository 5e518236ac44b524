"""Output of a run's metrics: ``metrics.jsonl`` and the trackers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowmem_ft.training.folder.run_files import RunFiles
from lowmem_ft.training.folder.run_folder import RunFolder
from lowmem_ft.training.processes.ranks import Ranks


@dataclass(frozen=True)
class RunMetrics:
    """Writer of a run's metrics: the main process writes the file; the trackers get what they show.

    Args:
        folder: the run's folder.
        ranks: the processes of the run.
        files: has the trackers.
    """

    folder: RunFolder
    ranks: Ranks
    files: RunFiles

    def write(self, record: dict[str, Any], *, to_trackers: bool = False) -> None:
        """Write one line.

        Args:
            record: the line's values, including its ``step``.
            to_trackers: whether to log it to the trackers as well.

        Raises:
            CheckpointError: if the file cannot be written.
        """
        if self.ranks.is_main:
            self.folder.write_metrics(record)
        if to_trackers:
            self.files.log(record)
