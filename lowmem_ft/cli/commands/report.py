"""``lowmem-ft report``: how runs went, with estimated and measured memory side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.output import Output
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.foundation.errors import UserError, raise_problems
from lowmem_ft.foundation.user_paths import expand_user

if TYPE_CHECKING:
    from lowmem_ft.reports.run_report import RunRecord

_EXAMPLES = """\
examples:
  lowmem-ft report runs/tiny
  lowmem-ft report runs/8b-24gb runs/8b-16gb --json"""


@explains_user_errors
def main(arguments: list[str]) -> int:
    """Print runs side by side.

    Args:
        arguments: folders of runs, and ``--json``.

    Returns:
        The exit code, 0.

    Raises:
        UserError: if a folder does not hold a run of this package; the error names all such folders.
    """
    options = _parser().parse_args(arguments)
    runs, problems = [], []
    for name in options.runs:
        try:
            runs.append(_read(expand_user(name)))
        except UserError as error:
            problems += error.problems
    raise_problems(problems)
    if options.json:
        print(json.dumps({"schema": 1, "runs": [run.to_json() for run in runs]}, indent=2))
        return 0
    from lowmem_ft.reports.run_report import run_report

    Output().add(run_report(runs))
    return 0


def _read(path: Path) -> RunRecord:
    """Return the record of the run in a folder.

    Raises:
        UserError: if it is not the folder of a run, or its files are damaged.
    """
    from lowmem_ft.recipe import load_recipe
    from lowmem_ft.reports.run_report import RunRecord
    from lowmem_ft.training.generation.generations_file import before_and_after, read_generations
    from lowmem_ft.training.run.replaced_run import METRICS_FILE, RECIPE_FILE
    from lowmem_ft.training.run.run_folder import RunFolder

    missing = [name for name in (RECIPE_FILE, METRICS_FILE) if not (path / name).is_file()]
    if missing:
        what = "is not a folder" if not path.is_dir() else f"has no {' and no '.join(missing)}"
        raise UserError(
            f"A report needs the folder of a run (training.output_dir), got {path}, which {what}. Name another."
        )
    folder = RunFolder(path, resume_from=None, overwrite=False)
    run = RunRecord(
        path=path,
        recipe=load_recipe(str(path / RECIPE_FILE)),
        metrics=folder.read_metrics(),
        is_finished=folder.model_folder.is_dir(),
        rehearsal=_rehearsal_in(path),
        generations=before_and_after(read_generations(path)),
    )
    run.check()
    return run


def _rehearsal_in(path: Path) -> dict[str, Any] | None:
    """Return what ``lowmem-ft rehearse`` has written for this report; None: it was not rehearsed.

    Raises:
        UserError: if this package did not write the file.
    """
    from lowmem_ft.training.run.replaced_run import REHEARSAL_FILE

    file = path / REHEARSAL_FILE
    if not file.is_file():
        return None
    try:
        values = json.loads(file.read_text("utf-8"))
        return {key: values[key] for key in ("peaks", "run", "recipe")}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} is not the result of a rehearsal. Delete it, or rehearse the run again with `lowmem-ft rehearse`."
        ) from error


def _parser() -> Parser:
    parser = Parser(
        prog="lowmem-ft report",
        description="Compare runs: steps, losses, speed, and memory as estimated and as measured.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", help="folders of runs, finished or not")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    return parser
