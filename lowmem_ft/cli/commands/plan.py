"""``lowmem-ft plan``: choose the memory knobs with which a step is fastest inside a budget, and say why."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lowmem_ft.cli.console.asking import settled
from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.output import Output, writing
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.cli.console.spinner import progress_line
from lowmem_ft.cli.console.written_files import file_problems
from lowmem_ft.cli.estimating.estimate_options import add_own_data, own_data_of, own_data_problems
from lowmem_ft.foundation.errors import EXIT_DOES_NOT_FIT, UserError
from lowmem_ft.foundation.packages import may_have_gpu

if TYPE_CHECKING:
    from lowmem_ft.foundation.memory.memory_estimate import StepTime
    from lowmem_ft.planning.planner import MemoryPlan, PlanProgress
    from lowmem_ft.planning.planner.run_length import RunLength
    from lowmem_ft.recipe import Recipe
    from lowmem_ft.recipe.request.request import Request

_USAGE = (
    "lowmem-ft plan recipe=NAME|PATH | model=NAME [key=value ...] [--gpu NAME]\n"
    "       [--max-gpus N] [--rows N [--epochs E]] [--write FILE.yaml]\n"
    "       [--json FILE|-] [--without-packages] [--overwrite]"
)
_EXAMPLES = """\
examples:
  lowmem-ft plan model=llama-3.1-8b budget=24GiB budget.host=64GiB
  lowmem-ft plan recipe=7b-bf16 --gpu rtx-4090 --write my.yaml
  lowmem-ft plan recipe=8b-bf16 --gpu 8xrtx-4090
  lowmem-ft plan model=llama-3.1-70b --gpu h100-80gb --max-gpus 8
  lowmem-ft plan recipe=7b-bf16 budget=8GiB 'plan.keep=[optimizer.state]' 'plan.allow=[lora,qlora]'

A plan keeps the rows of a step and the mathematics, except for unbiased rounding. plan.allow=[...] names what it may
give up, the least important first, and plan.keep=[...] the keys that it must not change. A model alone is planned for
steps of 16 rows of 2048 tokens. With --gpu 8xNAME each GPU takes the recipe's batch, with --max-gpus they share the
rows of a step. Ctrl-C ends the search and keeps the best plan so far.

Exit codes: 0 a plan that fits; 3 nothing fits; 2 the input is at fault."""


@explains_user_errors
def main(arguments: list[str]) -> int:
    """Plan what the settings describe.

    Args:
        arguments: ``recipe=NAME|PATH`` or ``model=NAME``, ``key=value`` settings and options.

    Returns:
        The exit code: 0 if the plan fits, else 3.
    """
    options, words = _parser().parse_options(arguments)
    request = settled(
        "plan",
        words,
        options.gpu,
        problems=_problems(options),
        further=lambda request: _refuse_no_device(request, arguments),
    )

    import torch

    import lowmem_ft.planning.planner
    from lowmem_ft.recipe.request.plan_defaults import named_as_planned
    from lowmem_ft.reports.estimate_words import short_name

    recipe = request.recipe
    if _is_open(request) and not torch.cuda.is_available():
        raise UserError(_for_no_device(arguments))
    with progress_line(f"{short_name(recipe.model.name_or_path or '')}: planning") as say:
        plan = lowmem_ft.planning.planner.plan(
            recipe,
            gpu=request.gpu,
            max_gpus=int(options.max_gpus or 1),
            on_progress=lambda progress: say(_words(progress)),
        )
    where = [place for place in (recipe.budget.device, request.gpu) if place is not None]
    named = named_as_planned(
        plan.recipe, request.settings, *(where or [plan.estimate.gpu.name.partition(" ")[0]])
    )
    return _report(dataclasses.replace(plan, recipe=named), request, options)


def _is_open(request: Request) -> bool:
    """Return whether neither a GPU nor a budget is named."""
    recipe = request.recipe
    return request.gpu is None and recipe.budget.device is None and not recipe.training.use_cpu


def _refuse_no_device(request: Request, arguments: Sequence[str]) -> None:
    if _is_open(request) and not may_have_gpu():
        raise UserError(_for_no_device(arguments))


def _shared(recipe: Recipe) -> list[str]:
    """Return the settings by which several processes share the model; empty for one process."""
    config = recipe.distributed
    if config.num_processes in (None, 1):
        return []
    strategy = [] if config.strategy is None else [f"distributed.strategy={config.strategy}"]
    return [*strategy, f"distributed.num_processes={config.num_processes}"]


def _for_no_device(arguments: Sequence[str]) -> str:
    """Return the error for neither GPU nor budget: planning for the processor takes minutes, and few users want it."""
    from lowmem_ft.recipe.command_lines import command_line, quoted

    on_gpu = quoted(command_line("plan", *arguments, gpu="rtx-4090"))
    within = quoted(command_line("plan", *arguments, "budget=24GiB"))
    return (
        f"A plan is for a GPU or a budget, got neither, and this machine has no GPU. Name a GPU, such as {on_gpu} "
        f"(`lowmem-ft gpus` lists them), or a budget, such as {within}; --gpu cpu plans for this machine's processor."
    )


def _words(progress: PlanProgress) -> str:
    """Return the progress of a search in less than 80 columns, with how to end it last."""
    best = progress.best
    found = "nothing fits yet" if best is None else "one fits"
    if best is not None and best.step is not None:
        found = f"{best.step.seconds:.3g} s a step so far"
    return f"planning: {progress.estimated} of {progress.combinations:,} tried, {found}; Ctrl-C ends it"


def _report(plan: MemoryPlan, request: Request, options: argparse.Namespace) -> int:
    from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
    from lowmem_ft.recipe import recipe_to_yaml
    from lowmem_ft.recipe.command_lines import launched
    from lowmem_ft.reports.costs import row_tokens_of, with_cost
    from lowmem_ft.reports.plan_table import another_plan, plan_table, planned_for, run_words, train_command
    from lowmem_ft.reports.text.document import Command, Document

    output, recipe = Output(options.json), request.recipe
    command = [*request.words, *_shared(recipe)] if request.recipe_name else None
    reason = _why_this_gpu(request)
    output.add(
        Document(f"{reason}; --gpu NAME takes another." if reason else None, plan_table(plan, recipe), gap=0)
    )
    values = plan.to_json()
    gpu, own_data = load_gpus().get(plan.estimate.gpu.name), own_data_of(options)
    row_tokens = row_tokens_of(plan.recipe, plan.estimate)
    values["chosen"]["estimate"] = with_cost(plan.estimate, gpu, own_data, row_tokens)
    if own_data is not None and plan.fits:
        output.add(f"Your data: {own_data.run_in_words(plan.estimate, gpu, row_tokens)}.")
    values["run"] = None
    if plan.fits and plan.estimate.step is not None:
        with progress_line("reading the data"):
            length = _length_or_problem(plan.recipe, plan.estimate.step)
        if isinstance(length, str):
            output.add(length)
        elif length is not None:
            values["run"] = dataclasses.asdict(length)
            output.add(run_words(length, plan.estimate))
    data = [] if recipe.data.is_named else ["data=YOUR_DATA"]
    if plan.fits and command is not None and options.write is None:
        output.add(Document("Train it:", Command(*train_command(plan, command), *data), gap=0))
    if options.write is not None and plan.fits:
        with writing("write", options.write) as path:
            trains = [*launched(plan.recipe), f"recipe={path}", *data]
            head = f"# {shlex.join(trains)}\n# {planned_for(plan)}\n"
            path.write_text(head + recipe_to_yaml(plan.recipe), encoding="utf-8")
        output.add(Document(f"Written: {path}. Train it:", Command(*trains), gap=0))
    elif options.write is not None:
        output.add(f"{options.write} is not written, because nothing fits.")
    elif plan.fits and command is None:  # train would plan a model alone again
        trains = Command(*launched(plan.recipe), "recipe=my.yaml", *data)
        output.add(Document("To train it, plan with --write my.yaml, then:", trains, gap=0))
    if not plan.fits:
        output.add(another_plan(plan, request.words, request.devices))
    output.write_json(values)
    return 0 if plan.fits else EXIT_DOES_NOT_FIT


def _why_this_gpu(request: Request) -> str:
    """Return which GPU of the catalogue was chosen for a budget; empty for a named GPU or this machine's."""
    from lowmem_ft.planning.estimator.device_target import choose_gpu

    recipe = request.recipe
    is_of_budget = request.gpu is None and recipe.budget.device is not None
    gpu, reason = (
        choose_gpu(None, recipe.budget, use_cpu=recipe.training.use_cpu) if is_of_budget else (None, "")
    )
    return f"D{reason[1:]}" if gpu is not None else ""


def _length_or_problem(recipe: Recipe, step: StepTime) -> RunLength | str | None:
    """Return the run's length, or why it is unknown; None if its data is not on this machine, or streamed."""
    from lowmem_ft.data.files.files import local_files
    from lowmem_ft.data.sources.listed import listed_sources
    from lowmem_ft.foundation.user_paths import expand_user
    from lowmem_ft.planning.planner.run_length import run_length

    paths = [one.path for one in listed_sources(recipe.data)]
    if not paths or recipe.data.streaming:
        return None
    try:
        is_here = all(local_files(path) or expand_user(path).is_dir() for path in paths)
        return run_length(recipe, step) if is_here else None
    except UserError as error:
        return f"The length of the run is unknown: {' '.join(error.problems)}"


def _problems(options: argparse.Namespace) -> Iterator[str]:
    yield from own_data_problems(options)
    if options.max_gpus not in (None, "1", "2", "4", "8"):
        yield (
            f"--max-gpus is a number of GPUs, 1, 2, 4 or 8, got {options.max_gpus}. Try --max-gpus 8, which tries the "
            "smaller numbers first, or leave it out."
        )
    yield from file_problems(options, "write", "json")
    if options.write is not None and Path(options.write).suffix not in (".yaml", ".yml"):
        yield f"--write names a recipe file, which ends in .yaml, got {options.write}."


def _parser() -> Parser:
    parser = Parser(
        prog="lowmem-ft plan",
        usage=_USAGE,
        description="Choose the memory settings with which a step is fastest inside a budget of device and host "
        "memory, and say why.",
        epilog=_EXAMPLES,
        allow_abbrev=False,
    )
    parser.add_gpu(
        "a GPU of `lowmem-ft gpus`, or cpu; without: this machine's GPU, or one of the budget's size"
    )
    parser.add_once(
        {
            "--max-gpus N": "if one GPU is not enough, try 2, 4, ... up to N of them, at most 8, that share the recipe",
            "--write FILE.yaml": "write the plan as a recipe that is ready to train",
            "--json FILE|-": "write the plan as JSON; - is stdout, then JSON alone",
        }
    )
    add_own_data(parser)
    parser.add_without_packages()
    parser.add_overwrite()
    return parser
