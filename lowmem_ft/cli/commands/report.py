"""``lowmem-ft report``: how runs went, with estimated and measured memory side by side."""

from __future__ import annotations

import argparse

from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.cli.console.written_files import file_problems
from lowmem_ft.foundation.errors import raise_problems
from lowmem_ft.foundation.user_paths import expand_user

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

    from lowmem_ft.cli.answers.report import report

    return report(options)


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
