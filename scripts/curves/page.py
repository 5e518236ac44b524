"""``docs/learning_curves.md`` and its picture, from the results that are kept."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from curves.runs import NUM_SEEDS, REFERENCE, ROOT, RUNGS
from curves.tasks import TASKS
from marked_table import table_of

from lowmem_ft.reports.plots.figure import Line, LineFigure
from lowmem_ft.reports.plots.line_svg import line_svg
from lowmem_ft.reports.plots.svg import stacked

PAGE = ROOT / "docs" / "learning_curves.md"
PICTURE = PAGE.with_suffix(".svg")

Result = dict[str, Any]


@dataclass(frozen=True)
class TaskResults:
    """The results of one task: what a rung's runs have in addition to, and apart from, float32's of the same seed.

    Args:
        results: runs of one task with one number of steps.
    """

    results: Sequence[Result]

    def of(self, rung: str) -> dict[int, Result]:
        """Return a rung's runs by seed."""
        return {row["seed"]: row for row in self.results if row["rung"] == rung}

    @property
    def spread(self) -> float | None:
        """The range of float32's final losses over the seeds; None with fewer than two."""
        losses = [final_loss(row) for row in self.of(REFERENCE).values()]
        return max(losses) - min(losses) if len(losses) > 1 else None

    def losses(self, rung: str) -> dict[int, list[float]]:
        """Return a rung's held-out losses by step."""
        return _by_step(row["held_out"] for row in self.of(rung).values())

    def differences(self, rung: str) -> dict[int, list[float]]:
        """Return a rung's loss less float32's with the same seed, by step; empty where no seed has both."""
        reference = {seed: dict(row["held_out"]) for seed, row in self.of(REFERENCE).items()}
        return _by_step(
            [(step, loss - reference[seed][step]) for step, loss in row["held_out"]]
            for seed, row in self.of(rung).items()
            if seed in reference
        )

    def final_differences(self, rung: str) -> list[float]:
        """Return the same after the last step."""
        by_step = self.differences(rung)
        return by_step[max(by_step)] if by_step else []

    def differs(self, rung: str) -> bool | None:
        """Return whether the mean difference is more than the seeds' spread; None without a spread or a difference."""
        differences, spread = self.final_differences(rung), self.spread
        return abs(statistics.mean(differences)) > spread if differences and spread is not None else None


def _by_step(curves: Iterable[Iterable[tuple[int, float]]]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for step, value in sorted(point for curve in curves for point in curve):
        found.setdefault(step, []).append(value)
    return found


def final_loss(result: Result) -> float:
    """Return the held-out loss after the last step."""
    return result["held_out"][-1][1]


def write_page(results: Sequence[Result], steps: int) -> None:
    """Write page and picture of the runs with a number of steps."""
    PAGE.write_text(page_of(results, steps), "utf-8")
    if any(row["steps"] == steps for row in results):
        PICTURE.write_text(picture_of(results, steps), "utf-8")


def page_of(results: Sequence[Result], steps: int) -> str:
    """Return the page of the runs with a number of steps."""
    return "\n\n".join(_parts(_by_task(results, steps), steps)) + "\n"


def picture_of(results: Sequence[Result], steps: int) -> str:
    """Return the picture of the runs with a number of steps, of which there is at least one."""
    by_task = _by_task(results, steps)
    figures = [
        figure for task in by_task if by_task[task].results for figure in _figures(task, by_task[task])
    ]
    return stacked([line_svg(figure) for figure in figures])


def summary_of(results: Sequence[Result], steps: int) -> str:
    """Return the verdicts of the runs with a number of steps, as a Markdown list; empty without any."""
    return _summary(_by_task(results, steps))


def _by_task(results: Sequence[Result], steps: int) -> dict[str, TaskResults]:
    return {
        task: TaskResults([row for row in results if row["task"] == task and row["steps"] == steps])
        for task in TASKS
    }


def _parts(by_task: dict[str, TaskResults], steps: int) -> Iterator[str]:
    rows = [row for of_task in by_task.values() for row in of_task.results]
    num_seeds = max([NUM_SEEDS, *(row["seed"] + 1 for row in rows)])
    planned = len(TASKS) * num_seeds * len(RUNGS)
    yield "<!-- written by scripts/learning_curves.py -->\n# Learning curves"
    yield _wrapped(
        "Does a rung of the [memory ladder](memory_ladder.md) learn as well as float32? SmolLM2-135M-Instruct is "
        f"fine-tuned in full for {steps} steps, with float32 AdamW and with each number format; all runs of a seed see "
        "the same data in the same order. Weights of other rungs than float32 are bfloat16, and so is what a layer "
        "computes: the row `split16`, whose optimizer is exact, has this rounding alone. The steps ran on a CPU; "
        "products of bfloat16 are computed in float32 and rounded once, as tensor cores do."
    )
    runs = f"{len(TASKS)} tasks, {num_seeds} seeds, {len(RUNGS)} rungs"
    yield _wrapped(
        f"All {planned} runs ({runs}) are made, by this command:"
        if len(rows) == planned
        else f"Runs made so far: **{len(rows)} of {planned}** ({runs}). "
        "This command makes the missing ones, and writes this page again after each:"
    )
    more_seeds = f" --seeds {num_seeds}" if num_seeds > NUM_SEEDS else ""
    yield f"```\npython scripts/learning_curves.py{more_seeds} --steps {steps}\n```"
    if not rows:
        return
    yield "![Held-out losses and their differences from float32](learning_curves.svg)"
    yield from filter(None, [_summary(by_task)])
    for task, of_task in by_task.items():
        if of_task.results:
            yield f"## {task.capitalize()}"
            yield _wrapped(f"{TASKS[task].what[:1].upper()}{TASKS[task].what[1:]}.")
            yield _final_table(of_task)
            yield _wrapped(_spread_words(of_task))
            yield _table_of_points(of_task)
    yield "## What the columns say"
    yield _wrapped(
        "Losses are nats per label token, over the held-out examples. A difference is a rung's loss less float32's "
        "with the same seed: the mean over the seeds, and the least and the largest. The spread of the seeds is the "
        "largest less the smallest final loss of float32. Distances are between final weights, with what a master "
        "holds, over all parameters (Euclidean), as a share of the way that float32's weights went from the start. "
        "For float32 it is the distance between a seed and seed 0: another order of the same data."
    )
    yield _wrapped(_provenance(rows))


def _summary(by_task: dict[str, TaskResults]) -> str:
    lines = []
    for task, of_task in by_task.items():
        verdicts = {rung: of_task.differs(rung) for rung in RUNGS if rung != REFERENCE and of_task.of(rung)}
        for words, verdict in (
            ("differ from float32 by more than the seeds' spread", True),
            ("differ by less than the seeds' spread", False),
            ("cannot be judged yet, for want of a second seed", None),
        ):
            names = [f"`{rung}`" for rung, found in verdicts.items() if found is verdict]
            if names:
                lines.append(_wrapped(f"- {task}: {', '.join(names)} {words}.", "  "))
    return "\n".join(lines)


def _final_table(of_task: TaskResults) -> str:
    heads = ("rung", "seeds", "final loss", "difference from float32", "distance of the weights")
    lines = []
    for rung in RUNGS:
        rows = list(of_task.of(rung).values())
        if rows:
            loss = statistics.mean(map(final_loss, rows))
            distances = [row["distance"] for row in rows if row["distance"] is not None]
            apart = "" if rung == REFERENCE else _range_words(of_task.final_differences(rung))
            far = f"{statistics.mean(distances):.3f}" if distances else ""
            lines.append((f"`{rung}`", str(len(rows)), f"{loss:.4f}", apart, far))
    return table_of(heads, lines)


def _range_words(differences: Sequence[float]) -> str:
    if not differences:
        return ""
    mean = f"{statistics.mean(differences):+.4f}"
    return f"{mean} ({min(differences):+.4f} to {max(differences):+.4f})" if len(differences) > 1 else mean


def _spread_words(of_task: TaskResults) -> str:
    if of_task.spread is None:
        return "The spread of the seeds is not known: float32 has been run with one seed."
    return f"The spread of the seeds is {of_task.spread:.4f}."


def _table_of_points(of_task: TaskResults) -> str:
    losses = {rung: of_task.losses(rung) for rung in filter(of_task.of, RUNGS)}
    steps = sorted({step for by_step in losses.values() for step in by_step})
    rows = (
        (f"`{rung}`", *(f"{statistics.mean(by_step[step]):.4f}" if step in by_step else "" for step in steps))
        for rung, by_step in losses.items()
    )
    return table_of(("held-out loss after step", *map(str, steps)), rows)


def _provenance(rows: Sequence[Result]) -> str:
    dates = sorted({row["date"] for row in rows})
    hardware = " and ".join(sorted({row["hardware"] for row in rows}))
    libraries = " and ".join(
        sorted({", ".join(f"{name} {number}" for name, number in row["versions"].items()) for row in rows})
    )
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return (
        f"Measured {when} on {hardware}; {libraries}. The runs, with their settings, are in "
        "`tests/data/measured/learning-curves.json`. Another processor rounds sums in another order: its numbers "
        "differ in late digits, all the more in later steps."
    )


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _figures(task: str, of_task: TaskResults) -> Iterator[LineFigure]:
    """Yield the mean losses, and each seed's differences from float32 with their mean; float32's are the line at 0."""
    losses, differences = [], []
    for rung in filter(of_task.of, RUNGS):
        losses.append(Line(words=rung, points=_means(of_task.losses(rung)), shows_points=True))
        by_step = of_task.differences(rung)
        if by_step:
            each = [(step, value) for step, values in by_step.items() for value in values]
            scattered = () if rung == REFERENCE else each
            differences.append(Line(words=rung, points=_means(by_step), scattered=scattered))
    yield LineFigure(title=f"{task}: nats per token", axis_words="step", unit="number", lines=losses)
    if len(differences) > 1:
        spread = of_task.spread
        title = (
            f"{task}: difference from float32{'' if spread is None else ' (grey: the spread of its seeds)'}"
        )
        shade = None if spread is None else (-spread, spread)
        yield LineFigure(title=title, axis_words="step", unit="number", lines=differences, shade=shade)


def _means(by_step: dict[int, list[float]]) -> list[tuple[float, float]]:
    return [(step, statistics.mean(values)) for step, values in by_step.items()]
