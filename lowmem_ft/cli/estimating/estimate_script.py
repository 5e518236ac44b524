"""``lowmem-ft estimate --script train.py -- ARGS``: the needs of a user's unchanged training script."""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import rich

from lowmem_ft.cli.console.output import Output
from lowmem_ft.cli.console.spinner import progress_line
from lowmem_ft.cli.estimating.estimate_files import write_pictures
from lowmem_ft.cli.estimating.estimate_options import (
    ALL_GPUS,
    FOR_THE_PROCESSOR,
    NO_SNAPSHOT_OF_CPU,
    steps_of,
)
from lowmem_ft.cli.estimating.lengths_that_fit import longest_rows_of_script
from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.foundation.errors import EXIT_DOES_NOT_FIT, UserError
from lowmem_ft.foundation.memory.memory_estimate import SCHEMA
from lowmem_ft.foundation.packages import may_have_gpu
from lowmem_ft.hf.trainers.attach_savings import Savings, TrainerSeen
from lowmem_ft.planning.estimator import CannotRun
from lowmem_ft.planning.script_runs import (
    ScriptError,
    ScriptEstimate,
    estimate_script,
    estimate_script_on_gpus,
)
from lowmem_ft.planning.script_runs.running import PASSED_OVER
from lowmem_ft.reports.estimate_table import estimate_table
from lowmem_ft.reports.gpu_table import gpu_table
from lowmem_ft.reports.script_facts import script_facts, ways_to_fit
from lowmem_ft.virtual_gpu.replay.trace_estimate import allocator_config_of_environment

logger = logging.getLogger(__name__)

_NO_TRAINER = (
    "hf.attach is for trainers of transformers and TRL; for a loop of your own, each technique has a function"
)

_SEVERAL_PROCESSES = "the script is one of several processes here; ask for one GPU to see what it saves there"

_OTHER_BATCHES = "the script looks for a batch that fits, and would find another one with techniques attached"


def report_on_script(path: Path, script_arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Report what a script needs on one GPU, or on all.

    Args:
        path: the script.
        script_arguments: its own.
        options: the command's.

    Returns:
        The exit code: 0 if it fits (on one GPU at least); 3 if it does not, or may not.

    Raises:
        UserError: if the script cannot be run, or not be estimated.
    """
    try:
        with _bound_to_stderr(), progress_line(f"{_doing(path)}: making it ready") as say:
            report = _on_all if options.gpu == ALL_GPUS else _on_one
            if options.longest_rows:
                report = longest_rows_of_script
            finish = report(path, script_arguments, options, say)
    except ScriptError as error:
        print(error.own_traceback, end="", file=sys.stderr)
        if options.gpu is None and not may_have_gpu():
            raise UserError(*error.problems, FOR_THE_PROCESSOR) from error
        raise
    return finish()


@contextlib.contextmanager
def _bound_to_stderr() -> Iterator[None]:
    """Bind the progress line to the current stderr, not to what replaces it while the script runs."""
    console = rich.get_console()
    console.file = sys.stderr
    try:
        yield
    finally:
        console.file = None  # type: ignore[assignment]  # whatever stderr is by then


def _doing(path: Path) -> str:
    return f"{path.name}: running on a virtual GPU"


def _says_steps(doing: str, options: argparse.Namespace, say: Callable[[str], None]) -> Callable[[int], None]:
    steps = steps_of(options)

    def on_step(step: int) -> None:
        say(f"{doing}: step {min(step + 1, steps)} of {steps}")

    return on_step


def _on_one(
    path: Path, arguments: Sequence[str], options: argparse.Namespace, say: Callable[[str], None]
) -> Callable[[], int]:
    seen = TrainerSeen()
    run = functools.partial(
        estimate_script,
        path,
        arguments,
        gpu=options.gpu,
        steps=steps_of(options),
        accelerate_config=options.accelerate_config,
    )
    reading = functools.partial(say, f"{_doing(path)}: reading its data")
    found = run(on_step=_says_steps(_doing(path), options, say), on_trainer=seen, on_reading=reading)
    savings, problems = None, seen.problems if seen.is_there else (_NO_TRAINER,)
    if seen.failure:
        logger.debug("No hf.attach suggestion:\n%s", seen.failure)
    if found.batches.failed:
        problems = (_OTHER_BATCHES,)
    elif found.estimate.processes is not None:
        problems = (_SEVERAL_PROCESSES,) if seen.is_there else problems
    elif found.estimate.fits:
        problems = ()  # techniques would free memory that is not lacking, and cost seconds
    elif settings := seen.settings:
        doing = f"{path.name}: once more, with hf.attach"
        say(doing)
        try:
            after = run(on_step=_says_steps(doing, options, say), on_trainer=seen.attach_to)
            whole = Savings(settings=settings, before=found, after=after)
            savings = whole if whole.is_one else None
        except ScriptError as error:  # it had no error without hf.attach
            logger.debug("No hf.attach suggestion: %s\n%s", error, error.own_traceback)
        except UserError as error:  # whose note the run without hf.attach has given, too
            problems = tuple(text for text in error.problems if not text.startswith(PASSED_OVER))
    return lambda: _report_one(found, savings, problems, options)


def _report_one(
    found: ScriptEstimate, savings: Savings | None, problems: Sequence[str], options: argparse.Namespace
) -> int:
    if found.estimate.is_of_cpu and options.snapshot is not None:
        raise UserError(NO_SNAPSHOT_OF_CPU)
    gpu = load_gpus().get(found.estimate.gpu.name)
    output = Output(options.json)
    price = gpu.cheapest_price if gpu else None
    output.add(
        estimate_table(found.estimate, price, (*script_facts(found), *_attach_facts(savings, problems))),
        FOR_THE_PROCESSOR if options.gpu is None and found.estimate.is_of_cpu else None,
        None if found.estimate.fits else ways_to_fit([found], is_all=False),
    )
    write_pictures(found.estimate, options, allocator_config_of_environment())
    output.write_json({**found.to_json(), "attach": savings and savings.to_json()})
    return 0 if found.estimate.fits else EXIT_DOES_NOT_FIT


def _attach_facts(savings: Savings | None, problems: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what ``hf.attach`` would save, or why that is not known; nothing if there is nothing to save."""
    yield from (
        ("" if index else "hf.attach", f"not estimated: {text}") for index, text in enumerate(problems)
    )
    if savings is not None:
        yield "hf.attach", str(savings)


def _on_all(
    path: Path, arguments: Sequence[str], options: argparse.Namespace, say: Callable[[str], None]
) -> Callable[[], int]:
    gpus = list(load_gpus().values())
    on_step = _says_steps(_doing(path), options, say)
    reading = functools.partial(say, f"{_doing(path)}: reading its data")
    results = estimate_script_on_gpus(
        path,
        arguments,
        gpus,
        steps=steps_of(options),
        accelerate_config=options.accelerate_config,
        on_step=on_step,
        on_reading=reading,
    )
    found = [result for result in results if not isinstance(result, CannotRun)]
    cannot_run = {
        result.gpu.name: " ".join(result.problems) for result in results if isinstance(result, CannotRun)
    }
    return lambda: _report_all(found, cannot_run, options)


def _report_all(
    found: Sequence[ScriptEstimate], cannot_run: dict[str, str], options: argparse.Namespace
) -> int:
    output = Output(options.json)
    fits = any(each.estimate.fits for each in found)
    output.add(
        gpu_table([each.estimate for each in found], load_gpus(), cannot_run),
        None if fits else ways_to_fit(found, is_all=True),
    )
    values = {
        "schema": SCHEMA,
        "estimates": [each.to_json() for each in found],
        "cannot_run": [{"gpu": gpu, "reason": reason} for gpu, reason in cannot_run.items()],
    }
    output.write_json(values)
    return 0 if fits else EXIT_DOES_NOT_FIT
