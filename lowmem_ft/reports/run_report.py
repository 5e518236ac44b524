"""Runs side by side: what was trained, how it went, and memory as estimated and as measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.text import Text

from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.foundation.catalog.gpu_spec import Gpu, Price
from lowmem_ft.foundation.memory.comparison import Peaks, Row, compared
from lowmem_ft.foundation.parallel_plan import ParallelPlan
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.monitoring.profiling.step_profile import Section, StepProfile
from lowmem_ft.recipe import recipe_to_yaml
from lowmem_ft.recipe.checks.path_checks import MODEL_FOLDER
from lowmem_ft.reports.estimate_table import format_dollars
from lowmem_ft.reports.estimate_words import duration
from lowmem_ft.reports.next_steps import next_steps
from lowmem_ft.reports.run_record import RunRecord
from lowmem_ft.reports.text.document import Document, Pairs, Table


def run_report(runs: Sequence[RunRecord]) -> Document:
    """Return a report with a column for each run: as many side by side as fit, the others below.

    The report of a single run is also the summary with which it ends: below the column is what to type next.

    Args:
        runs: at least one run.
    """
    profiles = (_profile_report(run.profile, run.path.name) for run in runs if run.profile is not None)
    ending = next_steps(runs[0]) if len(runs) == 1 else None
    return Document(_side_by_side(runs), *map(_answers, runs), *notes(runs), *profiles, ending)


def _side_by_side(runs: Sequence[RunRecord]) -> Table:
    sections = {
        "": list(map(facts, runs)),
        "estimated / measured": [
            {row.name: _cell(row) for row in compared(run.estimated, run.measured)} for run in runs
        ],
        "rehearsed / measured": [dict(rehearsed(run)) for run in runs],
    }
    rows: list[Sequence[str | Text]] = []
    for title, by_run in sections.items():
        if title and any(by_run):
            rows.append([Text(title, "bold"), *("" for _ in runs)])
        names = dict.fromkeys(name for of_run in by_run for name in of_run)
        rows += [[name, *(of_run.get(name, "-") for of_run in by_run)] for name in names]
    return Table(("", *(run.path.name or str(run.path) for run in runs)), rows, left=("",), stacks=True)


def _answers(run: RunRecord) -> Document:
    """Return the answers of a run before and after training, below their prompts; empty if it has no answers."""
    asked = [
        Pairs(
            [("prompt", _shortened(one.prompt))]
            + [
                (f"at step {step:,}", _shortened(answer) or "(nothing)")
                for step, answer in zip(one.steps, (one.before, one.after), strict=True)
            ],
            indent=0,
        )
        for one in run.generations
    ]
    return Document(*asked, title=f"Answers of {run.path.name}")


def _shortened(text: str | None) -> str:
    """Return a text in one line, its middle left out where it is long: the end of a prompt has the question."""
    if text is None:
        return "- (memory ran out)"
    words = " ".join(text.split())
    return words if len(words) <= 200 else f"{words[:80]} ... {words[-115:]}"


def _cell(row: Row) -> str:
    error = "" if row.error is None else f"\n{row.error:+.1%}"
    return f"{row.text(row.estimated)} / {row.text(row.measured)}{error}"


def rehearsed(run: RunRecord) -> Iterator[tuple[str, str]]:
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


def facts(run: RunRecord) -> dict[str, str]:
    """Return the facts about a run for readers; unknown facts are left out."""
    steps, loss, evaluations = run.steps, run.last("loss"), run.evaluations
    typical = [step for step in steps[1:] if not step.get("profiled")]  # the profiler makes steps slower
    rates = [record["tokens_per_second"] for record in typical or steps]
    found = {
        "recipe": run.recipe.name,
        "model": Path(run.recipe.model.name_or_path or "-").name,
        "status": "finished" if run.is_finished else "unfinished",
        "steps": f"{steps[-1]['step']:,}" if steps else "0",
    }
    if steps:
        found["tokens"] = f"{steps[-1]['tokens']:,}"
        found["tokens/s"] = f"{statistics.median(rates):,.0f}"
    if loss is not None:
        found["loss"] = f"{loss:.4f}"
    if len(evaluations) > 1:
        found[f"held-out loss at step {evaluations[0]['step']:,}"] = f"{evaluations[0]['eval_loss']:.4f}"
    if evaluations:
        found["held-out loss"] = f"{evaluations[-1]['eval_loss']:.4f}"
    if (best_step := run.last("best_step")) is not None:
        found["best step, that of the model"] = f"{best_step:,}"
    if steps and steps[-1].get("skipped_steps"):
        found["steps skipped"] = f"{steps[-1]['skipped_steps']:,}"
    if (seconds := run.last("seconds")) is not None:
        found["time of the run"] = duration(seconds)
        if (price := _price(run)) is not None:
            hourly = ParallelPlan(num_processes=run.last("num_processes")).in_all(price.usd_per_hour)
            found["cost"] = format_dollars(hourly * seconds / 3600)
    return found


def gpu_of(run: RunRecord) -> Gpu | None:
    """Return the catalogue's GPU that a run was on; None for a CPU, or one that the catalogue does not have."""
    device = run.last("device")
    return next((gpu for gpu in load_gpus().values() if gpu.full_name == device), None)


def _price(run: RunRecord) -> Price | None:
    """Return the price of one of a run's GPUs; None without a GPU, or one whose price the catalogue does not know."""
    gpu = gpu_of(run)
    return None if gpu is None else gpu.cheapest_price


def notes(runs: Sequence[RunRecord]) -> Iterator[str]:
    """Yield what has no estimate, or is not compared with its rehearsal, and why."""
    rehearsed = [run for run in runs if run.rehearsal is not None]
    changed = [
        run for run in rehearsed if run.rehearsal and run.rehearsal["recipe"] != recipe_to_yaml(run.recipe)
    ]
    on_cpu = [run for run in rehearsed if run.measured is not None and _is_of_cpu(run.measured)]
    for run in runs:
        if stopped := run.last("stopped"):
            yield f"{run.path.name} ended before its last step. {stopped}"
    for device, price in {run.last("device"): price for run in runs if (price := _price(run))}.items():
        yield (
            f"Cost: an hour of one {device} at {format_dollars(price.usd_per_hour)} ({price.provider}, {price.date})."
        )
    if names := _names(run for run in runs if run.estimated is None):
        yield f"No estimate was made for {names}: budget.preflight was false, or it failed."
    if names := _names(changed):
        yield f"The rehearsal of {names} had different settings from the run: compare with care."
    if names := _names(on_cpu):
        yield f"{names} ran on a CPU but was rehearsed for a GPU: memory and seconds are not compared."


def _names(runs: Iterable[RunRecord]) -> str:
    return ", ".join(run.path.name for run in runs)


def _profile_report(profile: StepProfile, run: str) -> Document:
    """Return a run's profile as a document.

    Args:
        profile: the profile.
        run: name of the run.
    """
    advice = Pairs([(f"{number}.", text) for number, text in enumerate(profile.advice, start=1)])
    return Document(
        *(Document(_table(section), title=section.title, gap=0) for section in profile.sections()),
        Document(advice, title="What to change first", gap=0) if advice else None,
        title=f"{run}: {profile.title}",
    )


def _table(section: Section) -> Table:
    """Return a table whose first column, of words, wraps where it has no room."""
    words = section.headings[0]
    return Table(section.headings, section.rows, left=(words,), wraps=(words, 24))
