"""The line of a run, on terminals of any width and where there is none."""

from __future__ import annotations

import io
import itertools
import logging
import re

import pytest
import rich
from rich.console import Console

from lowmem_ft.training.run.progress import ProgressDisplay
from lowmem_ft.training.run.time_left import TimeLeft

GIB = 2**30
RECORD = {
    "loss": 2.34567,
    "learning_rate": 1.234e-5,
    "tokens_per_second": 12345.6,
    "memory_now_bytes": 23 * GIB,
    "memory_peak_bytes": 75 * GIB,
}


def time_left(num_steps: int, seconds_a_step: float = 1) -> TimeLeft:
    """By a clock that is as much later each time that it is asked."""
    clock = itertools.count(step=seconds_a_step)
    return TimeLeft(
        num_steps=num_steps,
        step=0,
        eval_steps=None,
        save_steps=None,
        evaluates_at_end=False,
        clock=lambda: next(clock),
    )


def last_line(monkeypatch, width: int, num_steps: int = 5000) -> str:
    """What stands on a terminal of that width after four steps, drawn by rich itself."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None, legacy_windows=False)
    monkeypatch.setattr(rich, "_console", console)
    left = time_left(num_steps)
    with ProgressDisplay(
        num_steps=num_steps, step=0, logging_steps=10, time_left=left, console=rich.get_console()
    ) as display:
        for step in range(1, 5):
            with left.during("step"):
                pass
            display.update({**RECORD, "step": step + 1200})
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).replace("\r", "\n").splitlines()
    return [line for line in lines if line.strip()][-1]


@pytest.mark.parametrize("num_steps", [5000, 12_345_678])
@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_step_total_and_time_left_stay_in_any_width(monkeypatch, width, num_steps):
    line = last_line(monkeypatch, width, num_steps)
    assert len(line) <= width
    assert re.match(rf"step 1204/{num_steps}\b", line)
    assert re.search(r"left \d+:\d\d:\d\d$", line)


@pytest.mark.parametrize(
    "width,shown",
    [
        (60, ["loss", "lr"]),
        (80, ["loss", "lr", "━"]),
        (100, ["loss", "lr", "tokens/s", "━"]),
        (120, ["loss", "lr", "tokens/s", "peak", "━"]),
        (150, ["loss", "lr", "tokens/s", "peak", "memory 23.0 GiB", "━"]),
    ],
)
def test_memory_makes_room_first_and_then_tokens_a_second(monkeypatch, width, shown):
    line = last_line(monkeypatch, width)
    every = ["loss", "lr", "tokens/s", "peak", "memory 23.0 GiB", "━"]
    assert [part for part in every if part in line] == [part for part in every if part in shown]


def test_without_a_terminal_lines_are_whole_and_long_steps_have_a_time_left(monkeypatch, caplog):
    monkeypatch.setattr(rich, "_console", Console(file=io.StringIO(), force_terminal=False, width=80))
    left = time_left(20, seconds_a_step=400)
    with (
        caplog.at_level(logging.INFO),
        ProgressDisplay(
            num_steps=20, step=0, logging_steps=10, time_left=left, console=rich.get_console()
        ) as display,
    ):
        for step in range(1, 21):
            with left.during("step"):
                pass
            display.update({**RECORD, "step": step})
    first, last = caplog.messages
    assert first == (
        "step 10/20  loss 2.3457  lr 1.23e-05  12,346 tokens/s  memory 23.0 GiB, peak 75.0 GiB  1:06:40 left"
    )
    assert last.startswith("step 20/20  ")
    assert last.endswith("  0:00:00 left")
