"""Output of a run's metrics: ``metrics.jsonl`` and the trackers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowmem_ft.training.run.run_folder import RunFolder
from lowmem_ft.training.run_runtime import RunRuntime


@dataclass(frozen=True)
class RunMetrics:
    """Writer of a run's metrics: the main process writes the file; the runtime logs to the trackers.

    Args:
        folder: the run's folder.
        runtime: this process's runtime.
    """

    folder: RunFolder
    runtime: RunRuntime

    def write(self, record: dict[str, Any], *, to_trackers: bool = False) -> None:
        """Write one line.

        Args:
            record: the line's values, including its ``step``.
            to_trackers: whether to log it to the trackers as well.

        Raises:
            CheckpointError: if the file cannot be written.
        """
        if self.runtime.is_main:
            self.folder.write_metrics(record)
        if to_trackers:
            self.runtime.log(record)
