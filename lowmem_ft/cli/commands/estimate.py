"""``lowmem-ft estimate``: the needs of a run, before anything is trained or rented."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowmem_ft.cli.console.asking import libraries_loading, settled, start_logging
from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.estimating.estimate_options import (
    NO_SNAPSHOT_OF_CPU,
    check_one_gpu,
    length_argument,
    names_script,
    option_problems,
    parse,
    parse_for_script,
    problems_of_model_alone,
)
from lowmem_ft.cli.processes.isolated_process import in_own_process
from lowmem_ft.foundation.errors import UserError, raise_problems
from lowmem_ft.foundation.script_file import check_script

if TYPE_CHECKING:
    from lowmem_ft.recipe.request.request import Request


@explains_user_errors
def main(arguments: list[str]) -> int:
    """Estimate what the settings describe, on one GPU or on all of the catalogue.

    Args:
        arguments: ``recipe=NAME|PATH``, ``key=value`` settings and options.

    Returns:
        The exit code: 0 if it fits (on one GPU at least); 3 if it does not, or may not.
    """
    if names_script(arguments):
        return _of_script(arguments)
    options, words = parse(arguments)
    if options.longest_rows:
        check_one_gpu(options)
    request = settled(
        "estimate",
        words,
        options.gpu,
        problems=option_problems(options),
        further=lambda request: _check_options(request, options),
    )
    with libraries_loading():
        from lowmem_ft.cli.estimating.estimate_recipe import report_needs
    return report_needs(request, options)


def _check_options(request: Request, options: argparse.Namespace) -> None:
    """Refuse options that show one run, or a GPU, where the question has none."""
    if request.is_by_method:
        raise_problems(problems_of_model_alone(request, options))
    elif options.snapshot is not None and request.is_of_processor:
        raise UserError(NO_SNAPSHOT_OF_CPU)


def _of_script(arguments: Sequence[str]) -> int:
    """Report what a script needs: in a process of its own, which its crash may end."""
    options, script_arguments = parse_for_script(arguments)
    if options.longest_rows:
        check_one_gpu(options)
        length_argument(script_arguments)
    path = check_script(options.script)

    def estimated() -> int:
        start_logging(is_quiet=True)
        with libraries_loading():
            from lowmem_ft.cli.estimating.estimate_script import report_on_script
        return report_on_script(path, script_arguments, options)

    return in_own_process(estimated, str(path))
