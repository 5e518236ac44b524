"""Runs side by side: what was trained, how it went, and memory as estimated and as measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.memory.comparison import Peaks, Row, compared, peaks_in
from lowmem_ft.recipe import Recipe, recipe_to_yaml
from lowmem_ft.recipe.rules.path_checks import MODEL_FOLDER
from lowmem_ft.reports.text.document import Document, Table
from lowmem_ft.training.generation.generations_file import BeforeAndAfter


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Contents of a run's folder.

    Args:
        path: the folder.
        recipe: the recipe of the run.
        metrics: the lines of its ``metrics.jsonl``.
        is_finished: whether it holds the run's model.
        rehearsal: ``peaks``, ``run`` and ``recipe`` of its rehearsal; None: it was not rehearsed.
        generations: the first and last answers to its prompts.
    """

    path: Path
    recipe: Recipe
    metrics: Sequence[Mapping[str, Any]]
    is_finished: bool
    rehearsal: Mapping[str, Any] | None = None
    generations: Sequence[BeforeAndAfter] = ()

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        """The lines of optimizer steps."""
        return [record for record in self.metrics if "loss" in record]

    def last(self, key: str) -> Any:
        """Return the newest value of a key; None: there is no value."""
        return next((record[key] for record in reversed(self.metrics) if key in record), None)

    @property
    def estimated(self) -> Peaks | None:
        """Estimated peaks; None: there was no estimate."""
        return peaks_in(self.metrics)[0]

    @property
    def measured(self) -> Peaks | None:
        """Measured peaks; None: they were not written."""
        return peaks_in(self.metrics)[1]

    def check(self) -> None:
        """Check that the lines are those of a run.

        Raises:
            UserError: if one of them is not.
        """
        of_step = ("loss", "step", "tokens", "tokens_per_second")
        for number, record in enumerate(self.metrics, start=1):
            wanted = of_step if "loss" in record else ("step", *({"eval_loss"} & record.keys()))
            if not all(isinstance(record.get(key), (int, float)) for key in wanted):
                raise UserError(
                    f"{self.path}/metrics.jsonl, line {number}, is not a record of a run: {str(record)[:80]!r}."
                )
        try:
            peaks_in(self.metrics)
        except TypeError as error:
            raise UserError(
                f"{self.path}/metrics.jsonl has peaks that this version cannot read: {error}."
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Return plain values, rows of memory among them."""
        estimated, measured = peaks_in(self.metrics)
        return {
            "path": str(self.path),
            "recipe": self.recipe.name,
            "model": self.recipe.model.name_or_path,
            "finished": self.is_finished,
            "steps": self.steps[-1]["step"] if self.steps else 0,
            "loss": _in_json(self.last("loss")),
            "eval_loss": _in_json(self.last("eval_loss")),
            "estimated": estimated and estimated.to_json(),
            "measured": measured and measured.to_json(),
            "rehearsed": self.rehearsal and {name: self.rehearsal[name] for name in ("peaks", "run")},
            "generations": [asdict(one) for one in self.generations],
            "errors": {row.name: row.error for row in compared(estimated, measured)},
        }


def _in_json(number: float | None) -> float | None:
    """Return a number that JSON can hold; None for NaN and infinity, which it cannot."""
    return number if number is not None and math.isfinite(number) else None


def run_report(runs: Sequence[RunRecord]) -> Document:
    """Return a report with a column for each run: as many side by side as fit, the others below.

    Args:
        runs: at least one run.
    """
    return Document(_side_by_side(runs), *map(_answers, runs), *_notes(runs))


def _side_by_side(runs: Sequence[RunRecord]) -> Table:
    sections = {
        "": list(map(_facts, runs)),
        "estimated / measured": [
            {row.name: _cell(row) for row in compared(run.estimated, run.measured)} for run in runs
        ],
        "rehearsed / measured": [dict(_rehearsed(run)) for run in runs],
    }
    rows: list[Sequence[str | Text]] = []
    for title, by_run in sections.items():
        if title and any(by_run):
            rows.append([Text(title, "bold"), *("" for _ in runs)])
        names = dict.fromkeys(name for of_run in by_run for name in of_run)
        rows += [[name, *(of_run.get(name, "-") for of_run in by_run)] for name in names]
    return Table(("", *(run.path.name or str(run.path) for run in runs)), rows, left=("",), stacks=True)


def _answers(run: RunRecord) -> Document:
    """Return the answers of a run before and after training, side by side; empty if it has no answers."""
    if not run.generations:
        return Document()
    first, last = run.generations[0].steps
    rows = [
        (_shortened(one.prompt), _shortened(one.before), _shortened(one.after)) for one in run.generations
    ]
    headings = (f"prompts of {run.path.name}", f"at step {first}", f"at step {last}")
    return Document(Table(headings, rows, left=headings, stacks=True))


def _shortened(text: str | None) -> str:
    """Return a text in one line, its middle left out where it is long: the end of a prompt has the question."""
    if text is None:
        return "- (memory ran out)"
    words = " ".join(text.split())
    return words if len(words) <= 200 else f"{words[:80]} ... {words[-115:]}"


def _cell(row: Row) -> str:
    error = "" if row.error is None else f"\n{row.error:+.1%}"
    return f"{row.text(row.estimated)} / {row.text(row.measured)}{error}"


def _rehearsed(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield rehearsed and actual values of a run; nothing for a run that was not rehearsed."""
    if run.rehearsal is None:
        return
    of_run, steps = run.rehearsal["run"], run.steps
    if steps:
        yield "steps of the run", f"{of_run['steps']:,} / {steps[-1]['step']:,}"
        yield "tokens of the run", f"{of_run['tokens']:,} / {steps[-1]['tokens']:,}"
    if of_run["model_bytes"] and run.is_finished:
        files = [file for file in (run.path / MODEL_FOLDER).rglob("*") if file.is_file()]
        written_bytes = sum(file.stat().st_size for file in files)
        yield "files of the model", f"{format_bytes(of_run['model_bytes'])} / {format_bytes(written_bytes)}"
    measured = run.measured
    if measured is None or _is_of_cpu(measured):
        return
    for row in compared(Peaks.from_json(run.rehearsal["peaks"]), measured):
        if not row.is_part and row.estimated is not None:
            yield f"{row.name}, real batches", _cell(row)


def _is_of_cpu(measured: Peaks) -> bool:
    """Return whether a run was on a processor, which has other quantities than a GPU."""
    return measured.reserved_bytes is None


def _facts(run: RunRecord) -> dict[str, str]:
    """Return what is known of a run, for people; unknown facts are left out."""
    steps, loss, held_out = run.steps, run.last("loss"), run.last("eval_loss")
    rates = [record["tokens_per_second"] for record in steps[1:]] or [s["tokens_per_second"] for s in steps]
    facts = {
        "recipe": run.recipe.name,
        "model": Path(run.recipe.model.name_or_path or "-").name,
        "status": "finished" if run.is_finished else "unfinished",
        "steps": f"{steps[-1]['step']:,}" if steps else "0",
    }
    if steps:
        facts["tokens"] = f"{steps[-1]['tokens']:,}"
        facts["tokens/s"] = f"{statistics.median(rates):,.0f}"
    if loss is not None:
        facts["loss"] = f"{loss:.4f}"
    if held_out is not None:
        facts["held-out loss"] = f"{held_out:.4f}"
    if steps and steps[-1].get("skipped_steps"):
        facts["steps skipped"] = f"{steps[-1]['skipped_steps']:,}"
    return facts


def _notes(runs: Sequence[RunRecord]) -> Iterator[str]:
    """Yield what has no estimate, or is not compared with its rehearsal, and why."""
    rehearsed = [run for run in runs if run.rehearsal is not None]
    changed = [
        run for run in rehearsed if run.rehearsal and run.rehearsal["recipe"] != recipe_to_yaml(run.recipe)
    ]
    on_cpu = [run for run in rehearsed if run.measured is not None and _is_of_cpu(run.measured)]
    if names := _names(run for run in runs if run.estimated is None):
        yield f"No estimate was made for {names}: budget.preflight was false, or it failed."
    if names := _names(changed):
        yield f"The rehearsal of {names} had different settings from the run: compare with care."
    if names := _names(on_cpu):
        yield f"{names} ran on a CPU but was rehearsed for a GPU: memory and seconds are not compared."


def _names(runs: Iterable[RunRecord]) -> str:
    return ", ".join(run.path.name for run in runs)
