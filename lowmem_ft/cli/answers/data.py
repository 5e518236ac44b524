"""Rows as the model reads them, and what is wrong with the data, for ``lowmem-ft data``."""

from __future__ import annotations

import argparse
import sys

import datasets

from lowmem_ft.cli.console.output import Output
from lowmem_ft.foundation.errors import EXIT_DATA_IS_LOST
from lowmem_ft.recipe.request.request import Request
from lowmem_ft.reports.data_table import data_table
from lowmem_ft.training.run.data_inspection import inspect_data_of


def show_data(request: Request, options: argparse.Namespace) -> int:
    """Show what the model reads.

    Args:
        request: the question.
        options: the command's.

    Returns:
        The exit code: 0 if all is well; 4 if there is something that training warns of.
    """
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    found = inspect_data_of(request.recipe, show=options.show)
    output = Output(options.json)
    output.add(data_table(found))
    output.write_json(found.to_json())
    return EXIT_DATA_IS_LOST if found.warnings else 0
