"""``lowmem-ft report``: how runs went, with estimated and measured memory side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.output import Output, writing
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.cli.console.spinner import progress_line
from lowmem_ft.cli.console.written_files import file_problems
from lowmem_ft.foundation.errors import UserError, raise_problems
from lowmem_ft.foundation.user_paths import expand_user

if TYPE_CHECKING:
    from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
    from lowmem_ft.reports.run_record import RunRecord

_EXAMPLES = """\
examples:
  lowmem-ft report runs/tiny
  lowmem-ft report runs/8b-24gb runs/8b-16gb --json
  lowmem-ft report runs/8b-24gb --html report.html

The page has the report, the curves of losses, memory and speed, the timeline of a step's memory as estimated for the
run's device, all settings, and the commands that repeat the run. It needs no network."""

_NAMED_AS_RUN = ""
"""Value of ``--html`` without a file."""


@explains_user_errors
def main(arguments: list[str]) -> int:
    """Print runs side by side, or write one as a page.

    Args:
        arguments: folders of runs, and ``--json`` or ``--html``.

    Returns:
        The exit code, 0.

    Raises:
        UserError: if a folder does not hold a run of this package; the error names all such folders. If a page cannot
            be written.
    """
    options = _checked(_parser().parse_args(arguments))

    from lowmem_ft.reports.run_record import read_run

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
    from lowmem_ft.reports.run_report import run_report

    Output().add(run_report(runs))
    return 0


def _checked(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options with the page named after its run if the user gave no name; refuse files of no use."""
    if options.html is None:
        raise_problems(file_problems(options, "json"))
        return options
    problems = []
    if len(options.runs) > 1:
        problems.append(f"--html shows one run, got {len(options.runs)}. Write a page for each.")
    if options.json:
        problems.append("--html and --json are two forms of the same report, got both. Leave one out.")
    raise_problems(problems)
    html = options.html
    if html == _NAMED_AS_RUN:
        html = f"{expand_user(options.runs[0]).resolve().name}.html"
    named = argparse.Namespace(**{**vars(options), "html": html})
    raise_problems([*file_problems(named, "html")])
    return named


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
    from lowmem_ft.planning.estimator import estimate_memory
    from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
    from lowmem_ft.recipe.gpu_count import on_gpus
    from lowmem_ft.reports.run_report import gpu_of

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


def _parser() -> Parser:
    parser = Parser(
        prog="lowmem-ft report",
        description="Compare runs: steps, losses, speed, profiles, and memory as estimated and as measured.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", help="folders of runs, finished or not")
    parser.add_json()
    parser.add_argument(
        "--html",
        metavar="FILE",
        nargs="?",
        const=_NAMED_AS_RUN,
        help="write a run as one self-contained page; without FILE: NAME_OF_RUN_DIR.html in this folder",
    )
    parser.add_overwrite()
    return parser
