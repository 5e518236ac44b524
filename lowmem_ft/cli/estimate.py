"""``lowmem-ft estimate``: what a run will need, before anything is trained or rented."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowmem_ft.cli.exit_codes import explains_user_errors
from lowmem_ft.errors import EXIT_DOES_NOT_FIT, RecipeError, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from lowmem_ft.memory.estimate import MemoryEstimate
    from lowmem_ft.recipe import Recipe

_USAGE = (
    "lowmem-ft estimate recipe=NAME|PATH [key=value ...] [--gpu NAME|all] [--json FILE|-] [--plot FILE] "
    "[--snapshot FILE]"
)
_EXAMPLES = """\
examples:
  lowmem-ft estimate recipe=7b-bf16 --gpu l40s
  lowmem-ft estimate model=llama-3.1-8b --gpu all
  lowmem-ft estimate recipe=8b-bf16 data.max_length=8192 checkpointing.mode=none --gpu h100-80gb --plot memory.html
  lowmem-ft estimate recipe=my/recipe.yaml budget=24GiB --json -

recipe= may be left out where model= is given. Data is not read: rows are taken to be data.max_length long.
The recipe's own step runs on a virtual GPU, without weights. `lowmem-ft gpus` and `lowmem-ft models` list the names.
Exit codes: 0 it fits, 3 it does not, 2 the input is at fault."""


@explains_user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Estimate what the settings describe, on one GPU or on all of the catalogue.

    Args:
        argv: ``recipe=NAME|PATH``, ``key=value`` settings and options; None: those of this process.

    Returns:
        The exit code: 0 if it fits (on one GPU at least), else 3.
    """
    options, arguments = _parser().parse_known_args(sys.argv[1:] if argv is None else list(argv))
    recipe_name, settings = _split(arguments)
    _check_options(options)

    from lowmem_ft.cli.logs import set_up_logging, take_over_library_logs
    from lowmem_ft.recipe import load_recipe

    set_up_logging()
    logging.getLogger("lowmem_ft").setLevel(logging.WARNING)  # the report itself says what was chosen and why
    recipe = load_recipe(recipe_name, settings)
    import lowmem_ft.estimator  # noqa: F401 - imports the libraries whose logs are taken over

    take_over_library_logs()
    return (_estimate_on_all if options.gpu == "all" else _estimate_on_one)(recipe, options)


def _estimate_on_one(recipe: Recipe, options: argparse.Namespace) -> int:
    from lowmem_ft.catalog.gpus import load_gpus
    from lowmem_ft.estimator import estimate_memory
    from lowmem_ft.reports.estimate_table import estimate_table
    from lowmem_ft.reports.wording import is_cpu

    with _spinner(recipe):
        estimate = estimate_memory(recipe, options.gpu)
    gpu = load_gpus().get(estimate.gpu.name)
    console = _report_console(options)
    console.print(estimate_table(estimate, gpu.cheapest_price if gpu else None))
    if options.gpu is None and is_cpu(estimate):
        console.print("\nThis is for the machine's processor. See GPUs with --gpu NAME or --gpu all.")
    _write_json(estimate.to_json(), options)
    _write_files(estimate, options)
    return _verdict([estimate], options.gpu, recipe, console)


def _estimate_on_all(recipe: Recipe, options: argparse.Namespace) -> int:
    from lowmem_ft.catalog.gpus import load_gpus
    from lowmem_ft.estimator import estimate_on_gpus
    from lowmem_ft.memory.estimate import SCHEMA, MemoryEstimate
    from lowmem_ft.reports.gpu_table import by_price, gpu_table

    gpus = load_gpus()
    with _spinner(recipe):
        results = estimate_on_gpus(recipe, list(gpus.values()))
    estimates = by_price([result for result in results if isinstance(result, MemoryEstimate)], gpus)
    refusals = [result for result in results if not isinstance(result, MemoryEstimate)]
    cannot_run = {refusal.gpu.name: " ".join(refusal.problems) for refusal in refusals}
    console = _report_console(options)
    console.print(gpu_table(estimates, gpus, cannot_run))
    values = {
        "schema": SCHEMA,
        "estimates": [estimate.to_json() for estimate in estimates],
        "cannot_run": [{"gpu": gpu, "reason": reason} for gpu, reason in cannot_run.items()],
    }
    _write_json(values, options)
    return _verdict(estimates, _nearest(estimates).gpu.name, recipe, console)


def _verdict(estimates: Sequence[MemoryEstimate], gpu: str | None, recipe: Recipe, console: Console) -> int:
    """The exit code; if nothing fits, first the changes that would make it fit on a GPU."""
    from lowmem_ft.estimator.changes import cheapest_changes
    from lowmem_ft.reports.estimate_table import changes_table

    if any(estimate.fits for estimate in estimates):
        return 0
    with _spinner(recipe, "searching for changes that make it fit"):
        changes = cheapest_changes(recipe, gpu)
    console.print()
    console.print(changes_table(changes, _nearest(estimates).gpu.name))
    if len(estimates) == 1 and not changes.fitting:
        console.print("See other GPUs with --gpu all.")
    return EXIT_DOES_NOT_FIT


def _nearest(estimates: Sequence[MemoryEstimate]) -> MemoryEstimate:
    """Where the most is left, or the least is missing."""
    return max(estimates, key=lambda estimate: estimate.headroom_bytes or 0)


def _split(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The recipe's name or path, None where the settings name a model instead, and those settings."""
    choices = [argument for argument in arguments if argument.startswith("recipe=")]
    settings = [argument for argument in arguments if not argument.startswith("recipe=")]
    names_model = any(setting.startswith(("model=", "model.name_or_path=")) for setting in settings)
    if choices == ["recipe="] or len(choices) > 1 or (not choices and not names_model):
        seen = " ".join(choices or arguments) or "nothing"
        raise RecipeError(
            f"An estimate needs one recipe=NAME|PATH, or model=NAME, got {seen}. "
            "`lowmem-ft recipes` and `lowmem-ft models` list the names."
        )
    return (choices[0].partition("=")[2] if choices else None), settings


def _check_options(options: argparse.Namespace) -> None:
    """Refuse what could not be written, before time is spent on it."""
    files = {name: getattr(options, name) for name in ("json", "plot", "snapshot")}
    problems = []
    for name, path in files.items():
        if path is None or (name, path) == ("json", "-"):
            continue
        if not Path(path).absolute().parent.is_dir():
            problems.append(
                f"--{name} writes into a folder that exists, got {path}. Create {Path(path).parent} first."
            )
        if name != "json" and options.gpu == "all":
            problems.append(f"--{name} shows one GPU, got --gpu all. Name one, such as --gpu rtx-4090.")
    if problems:
        raise UserError(*problems)
    if options.plot is not None:
        from lowmem_ft.reports.memory_plot import check_plot_path

        check_plot_path(Path(options.plot))


def _write_files(estimate: MemoryEstimate, options: argparse.Namespace) -> None:
    from lowmem_ft.reports.memory_plot import write_plot
    from lowmem_ft.reports.snapshot import write_snapshot
    from lowmem_ft.reports.wording import is_cpu
    from lowmem_ft.virtual_gpu.estimate import allocator_config_of_environment

    config = allocator_config_of_environment()
    if options.plot is not None:
        with _writing("plot", options.plot) as path:
            write_plot(path, estimate, config)
    if options.snapshot is not None:
        if is_cpu(estimate):
            raise UserError("--snapshot shows CUDA's caching allocator, got a CPU. Name a GPU: --gpu NAME.")
        with _writing("snapshot", options.snapshot) as path:
            write_snapshot(path, estimate.timeline, config)


def _write_json(values: dict[str, Any], options: argparse.Namespace) -> None:
    text = json.dumps(values, indent=2)
    if options.json == "-":
        print(text)
    elif options.json is not None:
        with _writing("json", options.json) as path:
            path.write_text(f"{text}\n", encoding="utf-8")


@contextlib.contextmanager
def _writing(option: str, name: str) -> Iterator[Path]:
    try:
        yield Path(name)
    except OSError as error:
        raise UserError(f"--{option} cannot write {name}: {error.strerror}. Name another file.") from error


def _report_console(options: argparse.Namespace) -> Console:
    """Where the report goes: stdout, unless that is taken by JSON."""
    from rich.console import Console

    return Console(stderr=options.json == "-", highlight=False)


@contextlib.contextmanager
def _spinner(recipe: Recipe, doing: str = "running one step on a virtual GPU") -> Iterator[None]:
    """A sign of life on a terminal; nothing where stderr is a file or a pipe."""
    import rich

    console = rich.get_console()
    sign = console.status(f"{recipe.model.name_or_path}: {doing} ...") if console.is_terminal else None
    with sign or contextlib.nullcontext():
        yield


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lowmem-ft estimate",
        usage=_USAGE,
        description="Say what a run will need on a GPU: memory by use and phase, time, cost, and whether it fits.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME|all",
        help="a GPU of `lowmem-ft gpus`, cpu, or all GPUs by price; without: what this machine has",
    )
    parser.add_argument(
        "--json", metavar="FILE|-", help="write the estimate as JSON; - is stdout, then JSON alone"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw memory over the run: .html to explore, or .png")
    parser.add_argument(
        "--snapshot", metavar="FILE", help="write a .pickle that https://pytorch.org/memory_viz opens"
    )
    return parser
