"""The rehearsal of a run, its report, and the search for a change with which it fits."""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import Any

from lowmem_ft.cli.console.output import Output
from lowmem_ft.cli.console.spinner import progress_line
from lowmem_ft.foundation.errors import EXIT_DOES_NOT_FIT
from lowmem_ft.foundation.system.atomic_write import write_whole_file
from lowmem_ft.foundation.system.interrupts import defer_signals
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.planning.planner.outlook import outlook_for
from lowmem_ft.planning.rehearsal import Rehearsal, rehearse
from lowmem_ft.planning.rehearsal.fix_search import Fix, FixSearch
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.command_lines import command_line, quoted
from lowmem_ft.recipe.request.request import Request
from lowmem_ft.recipe.rules.output_folder import run_folder_of
from lowmem_ft.reports.estimate_table import way_to_a_plan
from lowmem_ft.reports.estimate_words import short_name
from lowmem_ft.reports.rehearsal_table import fixes_table, rehearsal_table
from lowmem_ft.reports.text.document import Document
from lowmem_ft.training.folder.replaced_run import REHEARSAL_FILE


def rehearse_run(request: Request, options: argparse.Namespace) -> int:
    """Rehearse a run, and report it.

    Args:
        request: the question.
        options: the command's.

    Returns:
        The exit code: 0 if it fits; 3 if it does not, or may not.
    """
    recipe = request.recipe
    doing = f"{short_name(recipe.model.name_or_path or '')}: rehearsing"
    with progress_line(doing) as say:
        found = rehearse(
            recipe,
            request.gpu,
            steps=options.steps,
            kept=KeptTraces.of_user(),
            on_step=lambda step, shapes: say(f"{doing}: step {step:,}, shapes traced {shapes}"),
        )
    output = Output(options.json)
    output.add(rehearsal_table(found))
    values = found.to_json()
    if not found.fits and (options.json is None if options.changes is None else options.changes):
        output.add(_mended(found, values))
    elif not found.fits:
        output.add(
            "With --changes: find and rehearse the smallest change with which it fits, which takes a few minutes."
        )
    if not found.fits:
        output.add(way_to_a_plan(request.words, recipe, found.estimate, request.devices))
    output.add(_kept(recipe, values))
    output.write_json(values)
    return 0 if found.fits else EXIT_DOES_NOT_FIT


def _mended(found: Rehearsal, values: dict[str, Any]) -> Document:
    """Return the report on rehearsed changes, up to the first that fits; add them to the values."""
    tried: list[Fix] = []
    complete = False
    doing = "searching for a change with which it fits"
    with defer_signals() as raise_if_lost, progress_line(doing) as say:

        def before_an_estimate(made: int) -> None:
            raise_if_lost()
            say(f"{doing}: {made} estimated, {len(tried)} rehearsed; Ctrl-C ends it")

        def on_step(step: int, shapes: int) -> None:
            raise_if_lost()
            say(f"rehearsing a change: step {step:,}, shapes traced {shapes}; Ctrl-C ends it")

        mending = FixSearch(
            found,
            kept=KeptTraces.of_user(),
            on_estimate=before_an_estimate,
            on_step=on_step,
            outlook_of=outlook_for,
        )
        with contextlib.suppress(KeyboardInterrupt):
            for mend in mending:
                tried.append(mend)
                if mend.rehearsal.fits:
                    break
            complete = True
    values["mends"] = [mend.to_json() for mend in tried]
    return fixes_table(tried, mending.all_together, found.gpu.name, complete=complete)


def _kept(recipe: Recipe, values: dict[str, Any]) -> str:
    """Write the results into the run's folder, for ``lowmem-ft report``; return a sentence on that."""
    file = run_folder_of(recipe) / REHEARSAL_FILE
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole_file(file, json.dumps(values))
    except OSError as error:
        return f"Not kept for `lowmem-ft report`: {file} cannot be written ({error.strerror})."
    return (
        f"Kept in {file}: after the run, {quoted(command_line('report', str(file.parent)))} compares it with "
        "what was measured."
    )
