"""Reports of runs: tables side by side, JSON, or one run as a page."""

from __future__ import annotations

import argparse
from pathlib import Path

from lowmem_ft.cli.console.output import Output, writing
from lowmem_ft.cli.console.spinner import progress_line
from lowmem_ft.foundation.errors import UserError, raise_problems
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.user_paths import expand_user
from lowmem_ft.recipe.gpu_count import on_gpus
from lowmem_ft.reports.run_record import RunRecord, read_run
from lowmem_ft.reports.run_report import gpu_of, run_report


def report(options: argparse.Namespace) -> int:
    """Print runs side by side, or write one as a page.

    Args:
        options: the command's.

    Returns:
        The exit code, 0.

    Raises:
        UserError: if a folder does not hold a run of this package; the error names all such folders. If a page cannot
            be written.
    """
    runs, problems = [], []
    for name in options.runs:
        try:
            runs.append(read_run(expand_user(name)))
        except UserError as error:
            problems += error.problems
    raise_problems(problems)
    if options.json:
        Output(options.json).write_json({"schema": 1, "runs": [run.to_json() for run in runs]})
        return 0
    if options.html is not None:
        return _write_page(runs[0], options.html)
    Output().add(run_report(runs))
    return 0


def _write_page(run: RunRecord, file: str) -> int:
    from lowmem_ft.reports.run_page import run_page

    with progress_line(f"{run.path.name}: estimating a step of its recipe"):
        text = run_page(run, _estimate(run))
    with writing("html", file) as path:
        path.write_text(text, encoding="utf-8")
    Output().add(f"The report of {run.path} is in {Path(file)}.")
    return 0


def _estimate(run: RunRecord) -> MemoryEstimate | str:
    """Return an estimate of a run's recipe on the run's device, or the reason why it is missing."""
    from lowmem_ft.planning.estimator import estimate_memory  # torch, which only a page needs
    from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces

    device, processes = run.last("device"), run.last("num_processes") or 1
    gpu = gpu_of(run)
    if device is None:
        return "The run has not measured its memory yet, so its device is not known: no step is estimated."
    if gpu is None and device.lower() != "cpu":
        return f"The catalogue of GPUs does not have {device}: no step is estimated."
    try:
        recipe, name = on_gpus(run.recipe, None if gpu is None else f"{processes}x{gpu.name}")
        return estimate_memory(recipe, name or "cpu", kept=KeptTraces.of_user())
    except UserError as error:
        return f"No step is estimated: {' '.join(error.problems)}"
