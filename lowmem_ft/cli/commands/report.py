"""``lowmem-ft report``: how runs went, with estimated and measured memory side by side."""

from __future__ import annotations

import json

from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.output import Output
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.foundation.errors import UserError, raise_problems
from lowmem_ft.foundation.user_paths import expand_user

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

    from lowmem_ft.reports.run_record import read_run

    runs, problems = [], []
    for name in options.runs:
        try:
            runs.append(read_run(expand_user(name)))
        except UserError as error:
            problems += error.problems
    raise_problems(problems)
    if options.json:
        print(json.dumps({"schema": 1, "runs": [run.to_json() for run in runs]}, indent=2))
        return 0
    from lowmem_ft.reports.run_report import run_report

    Output().add(run_report(runs))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="lowmem-ft report",
        description="Compare runs: steps, losses, speed, profiles, and memory as estimated and as measured.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", help="folders of runs, finished or not")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    return parser
