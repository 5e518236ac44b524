"""``lowmem-ft rehearse``: a complete run without its values, before a GPU is rented."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lowmem_ft.cli.console.asking import settled
from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.output import Output
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.cli.console.spinner import progress_line
from lowmem_ft.cli.console.written_files import file_problems
from lowmem_ft.foundation.errors import EXIT_DOES_NOT_FIT
from lowmem_ft.foundation.system.interrupts import defer_signals, on_interrupt

if TYPE_CHECKING:
    from lowmem_ft.planning.rehearsal import Rehearsal
    from lowmem_ft.planning.rehearsal.fix_search import Fix
    from lowmem_ft.recipe import Recipe
    from lowmem_ft.reports.text.document import Document

_USAGE = (
    "lowmem-ft rehearse recipe=NAME|PATH [key=value ...] [--gpu NAME]\n"
    "       [--steps N] [--changes|--no-changes] [--json FILE|-]\n"
    "       [--without-packages] [--overwrite]"
)
_EXAMPLES = """\
examples:
  lowmem-ft rehearse recipe=7b-lora data=chats.jsonl --gpu rtx-4090
  lowmem-ft rehearse recipe=8b-24gb data=chats.jsonl --gpu rtx-4090 --steps 100
  lowmem-ft rehearse recipe=my.yaml --gpu l4 --json rehearsal.json

The run's own loop goes over the real data, tokenized and batched as in training; the model is built from its config
alone, on a virtual GPU. It needs the data and the tokenizer: without access to the hub, name a folder with
model.tokenizer_name_or_path=FOLDER. One step is traced for each shape of data, and the others of its shape are counted.

Exit codes: 0 it fits; 3 it does not, or may not; 2 the input is at fault."""


@explains_user_errors
def main(arguments: list[str]) -> int:
    """Rehearse what the settings describe.

    Args:
        arguments: ``recipe=NAME|PATH``, ``key=value`` settings and options.

    Returns:
        The exit code: 0 if it fits; 3 if it does not, or may not.
    """
    with on_interrupt("while rehearsing: nothing was kept."):
        return _rehearse(arguments)


def _rehearse(arguments: list[str]) -> int:
    options, words = _parser().parse_options(arguments)
    request = settled("rehearse", words, options.gpu, problems=_problems(options))

    import lowmem_ft.planning.rehearsal
    from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
    from lowmem_ft.reports.estimate_table import way_to_a_plan
    from lowmem_ft.reports.estimate_words import short_name
    from lowmem_ft.reports.rehearsal_table import rehearsal_table

    recipe = request.recipe
    doing = f"{short_name(recipe.model.name_or_path or '')}: rehearsing"
    with progress_line(doing) as say:
        found = lowmem_ft.planning.rehearsal.rehearse(
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
    from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
    from lowmem_ft.planning.planner.outlook import outlook_for
    from lowmem_ft.planning.rehearsal.fix_search import FixSearch
    from lowmem_ft.reports.rehearsal_table import fixes_table

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
    from lowmem_ft.foundation.system.atomic_write import write_whole_file
    from lowmem_ft.recipe.command_lines import command_line, quoted
    from lowmem_ft.recipe.rules.output_folder import run_folder_of
    from lowmem_ft.training.folder.replaced_run import REHEARSAL_FILE

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


def _problems(options: argparse.Namespace) -> Iterator[str]:
    if options.steps is not None and options.steps < 1:
        yield f"--steps is at least 1, got {options.steps}."
    yield from file_problems(options, "json")


def _parser() -> Parser:
    parser = Parser(
        prog="lowmem-ft rehearse",
        usage=_USAGE,
        description="Execute a complete training run on a virtual GPU, without values: memory over the real batches, "
        "hours, cost, files, warnings.",
        epilog=_EXAMPLES,
        allow_abbrev=False,
    )
    parser.add_gpu("a GPU of `lowmem-ft gpus`; without: what this machine has, or one of the budget's size")
    parser.add_once({"--steps N": "optimizer steps to rehearse, from the first; without: all"}, type=int)
    parser.add_once({"--json FILE|-": "write the result as JSON; - is stdout, then JSON alone"})
    parser.add_argument(
        "--changes",
        action=argparse.BooleanOptionalAction,
        help="if it does not fit, search for the smallest change with which it does and that trains the same numbers, "
        "and rehearse it, which takes minutes; the default, except with --json (Ctrl-C ends the search)",
    )
    parser.add_without_packages()
    parser.add_overwrite()
    return parser
