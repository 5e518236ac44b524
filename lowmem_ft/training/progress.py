"""What a person sees while a run goes on: a live line on a terminal, a line now and then in a file."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any

import rich
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lowmem_ft.units import format_bytes

logger = logging.getLogger(__name__)


class ProgressDisplay:
    """Step, loss, learning rate, tokens per second, memory and time left.

    Args:
        num_steps: optimizer steps in all.
        step: steps already taken.
        logging_steps: where there is no terminal, steps between two lines.
        enabled: False in all processes but one.
    """

    def __init__(self, *, num_steps: int, step: int, logging_steps: int, enabled: bool) -> None:
        console = rich.get_console()  # shared with the log, so that no line cuts through the bar
        self._logging_steps = logging_steps
        self._enabled = enabled
        self._live = enabled and console.is_terminal
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
            disable=not self._live,
        )
        self._num_steps = num_steps
        self._task = self._progress.add_task("train", total=num_steps, completed=step, status="")

    def __enter__(self) -> ProgressDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, record: dict[str, Any]) -> None:
        """Show one step's metrics, as they stand in ``metrics.jsonl``."""
        if not self._enabled:
            return
        status = (
            f"loss {record['loss']:.4f}  lr {record['learning_rate']:.2e}  "
            f"{record['tokens_per_second']:,.0f} tokens/s  "
            f"memory {format_bytes(record['memory_now_bytes'])}, peak {format_bytes(record['memory_peak_bytes'])}"
        )
        self._progress.update(self._task, completed=record["step"], status=status)
        is_due = record["step"] % self._logging_steps == 0 or record["step"] == self._num_steps
        if is_due and not self._live:
            remaining = self._progress.tasks[0].time_remaining
            left = "" if remaining is None else f"  {remaining:,.0f} s left"
            logger.info("step %d/%d  %s%s", record["step"], self._num_steps, status, left)
