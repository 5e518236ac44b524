"""Progress display of a run: a live line on a terminal, periodic lines in a log file."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection, Iterator
from types import TracebackType
from typing import Any

import rich
from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.training.run.time_left import TimeLeft

logger = logging.getLogger(__name__)

GAP = "  "
DROPPED_FIRST = (
    "memory_now",
    "memory",
    "half_of_the_bar",
    "tokens_per_second",
    "bar",
    "elapsed",
    "learning_rate",
    "aux_loss",
    "loss",
)
"""Parts that a narrow terminal leaves out, in this order; step, total and time left always stay."""


class ProgressDisplay:
    """Display of step, loss, learning rate, tokens per second, memory and time left.

    Args:
        num_steps: optimizer steps in all.
        step: steps already taken.
        logging_steps: steps between two lines if there is no terminal.
        time_left: estimates how long the rest of the run takes.
        console: the console of the display; if the log uses the same one, no log line breaks the bar. None: no display.
    """

    def __init__(
        self, *, num_steps: int, step: int, logging_steps: int, time_left: TimeLeft, console: Console | None
    ) -> None:
        self._logging_steps = logging_steps
        self._time_left = time_left
        self._enabled = console is not None
        self._live = console is not None and console.is_terminal
        is_shared = console is rich.get_console()  # other output is printed above the bar
        self._progress = Progress(
            _OneLine(console, time_left),
            console=console,
            disable=not self._live,
            redirect_stdout=is_shared,
            redirect_stderr=is_shared,
        )
        self._num_steps = num_steps
        self._task = self._progress.add_task("train", total=num_steps, completed=step, status={})

    def __enter__(self) -> ProgressDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(
            OSError
        ):  # the terminal may be gone, which ends no run in another way than it ends
            self._progress.stop()

    def update(self, record: dict[str, Any]) -> None:
        """Show one step's metrics, a record of ``metrics.jsonl``."""
        if not self._enabled:
            return
        status = _status(record)
        self._progress.update(self._task, completed=record["step"], status=status)
        is_due = record["step"] % self._logging_steps == 0 or record["step"] == self._num_steps
        if is_due and not self._live:
            parts = [text for name, text in status.items() if name != "memory"]
            if (seconds := self._time_left.seconds()) is not None:
                parts.append(f"{_clock_time(seconds)} left")
            logger.info("step %d/%d  %s", record["step"], self._num_steps, GAP.join(parts))


class _OneLine(ProgressColumn):
    """The whole display, fitted to the terminal's width each time it is drawn."""

    max_refresh = None

    def __init__(self, console: Console | None, time_left: TimeLeft) -> None:
        super().__init__()
        self._time_left = time_left
        self._console = console or rich.get_console()

    def render(self, task: Task) -> Table:
        """Return the parts that fit, after leaving out others in the order of :data:`DROPPED_FIRST`."""
        width = self._console.width
        *choices, shortest = self._choices(task)
        parts = next((parts for parts in choices if _width(parts) <= width), shortest)
        line = Table.grid(padding=0)
        for _ in parts:
            line.add_column(no_wrap=True)
        line.add_row(*parts)
        return line

    def _choices(self, task: Task) -> Iterator[list[Text | ProgressBar]]:
        """Yield shorter and shorter lines: from all parts to step, total and time left alone."""
        for count in range(len(DROPPED_FIRST) + 1):
            yield self._parts(task, DROPPED_FIRST[:count])
        yield self._parts(task, DROPPED_FIRST, gap=" ")

    def _parts(self, task: Task, dropped: Collection[str], gap: str = GAP) -> list[Text | ProgressBar]:
        status = {name: text for name, text in task.fields["status"].items() if name not in dropped}
        if "memory_now" in status:
            status.pop("memory", None)
        step = f"step {task.completed:.0f}/{task.total or 0:.0f}"
        elapsed = [] if "elapsed" in dropped else [TimeElapsedColumn().render(task).plain]
        texts = [step, *status.values(), *elapsed, f"left {_clock_time(self._time_left.seconds())}"]
        parts: list[Text | ProgressBar] = [Text(texts[0])]
        if "bar" not in dropped:
            width = 10 if "half_of_the_bar" in dropped else 20
            parts += [Text(gap), ProgressBar(total=task.total, completed=task.completed, width=width)]
        return [*parts, Text("".join(f"{gap}{text}" for text in texts[1:]))]


def _status(record: dict[str, Any]) -> dict[str, str]:
    """Return the metrics as texts; ``memory`` is the short form of ``memory_now``."""
    peak = f"peak {format_bytes(record['memory_peak_bytes'])}"
    of_routers = {"aux_loss": f"aux_loss {record['aux_loss']:.4f}"} if "aux_loss" in record else {}
    return {
        "loss": f"loss {record['loss']:.4f}",
        **of_routers,
        "learning_rate": f"lr {record['learning_rate']:.2e}",
        "tokens_per_second": f"{record['tokens_per_second']:,.0f} tokens/s",
        "memory_now": f"memory {format_bytes(record['memory_now_bytes'])}, {peak}",
        "memory": peak,
    }


def _clock_time(seconds: float | None) -> str:
    if seconds is None:
        return "-:--:--"
    minutes, seconds = divmod(math.ceil(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def _width(parts: list[Text | ProgressBar]) -> int:
    return sum(part.cell_len if isinstance(part, Text) else part.width or 0 for part in parts)
