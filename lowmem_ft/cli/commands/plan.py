"""``lowmem-ft plan``: choose the memory knobs with which a step is fastest inside a budget, and say why."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.output import Output, writing
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.cli.console.spinner import libraries_loading, progress_line
from lowmem_ft.cli.estimating.estimate_options import (
    ALL_GPUS,
    add_own_data,
    file_problems,
    gpu_problems,
    own_data_of,
    own_data_problems,
    split_recipe,
)
from lowmem_ft.foundation.errors import EXIT_DOES_NOT_FIT, UserError, raise_problems, raise_together
from lowmem_ft.foundation.packages import may_have_gpu

if TYPE_CHECKING:
    from lowmem_ft.foundation.memory.memory_estimate import StepTime
    from lowmem_ft.planning.planner import MemoryPlan, PlanProgress
    from lowmem_ft.planning.planner.run_length import RunLength
    from lowmem_ft.recipe import Recipe

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
    parser = _parser()
    options, others = parser.parse_options(arguments)
    recipe_name, settings = split_recipe(others, "A plan")
    _check(options)
    options.asked, options.devices = others, options.gpu

    from lowmem_ft.cli.console.logs import set_up_logging, take_over_library_logs
    from lowmem_ft.recipe import load_recipe
    from lowmem_ft.recipe.gpu_count import on_gpus
    from lowmem_ft.recipe.reading.defaults import named_as_planned, with_defaults_of_plan
    from lowmem_ft.recipe.rules.budget_limits import check_budget_of_plan
    from lowmem_ft.recipe.rules.path_checks import check_model_files, check_packages, check_sizes_of_model

    set_up_logging()
    asked = settings if recipe_name is not None else with_defaults_of_plan(settings)
    with libraries_loading():
        recipe = load_recipe(recipe_name, asked)
        recipe, options.gpu = on_gpus(recipe, options.gpu, is_planned=True)
        is_open = options.gpu is None and recipe.budget.device is None and not recipe.training.use_cpu
        raise_together(
            lambda: check_budget_of_plan(recipe, options.gpu),
            lambda: check_model_files(recipe, architecture_only=True),
            lambda: check_sizes_of_model(recipe, is_planned=True),
            lambda: check_packages(recipe),
        )
        if is_open and not may_have_gpu():
            raise UserError(_for_no_device(arguments))
        import torch

        if is_open and not torch.cuda.is_available():
            raise UserError(_for_no_device(arguments))
        import lowmem_ft.planning.planner
        from lowmem_ft.reports.wording import short_name

    take_over_library_logs()
    with progress_line(f"{short_name(recipe.model.name_or_path or '')}: planning") as say:
        plan = lowmem_ft.planning.planner.plan(
            recipe,
            gpu=options.gpu,
            max_gpus=int(options.max_gpus or 1),
            on_progress=lambda progress: say(_words(progress)),
        )
    where = [place for place in (recipe.budget.device, options.gpu) if place is not None]
    named = named_as_planned(plan.recipe, settings, *(where or [plan.estimate.gpu.name.partition(" ")[0]]))
    plan = dataclasses.replace(plan, recipe=named)
    return _report(
        plan, recipe, [f"recipe={recipe_name}", *settings, *_shared(recipe)] if recipe_name else None, options
    )


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


def _report(
    plan: MemoryPlan, recipe: Recipe, command: Sequence[str] | None, options: argparse.Namespace
) -> int:
    from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
    from lowmem_ft.recipe import recipe_to_yaml
    from lowmem_ft.recipe.command_lines import launched
    from lowmem_ft.reports.costs import row_tokens_of, with_cost
    from lowmem_ft.reports.plan_table import another_plan, plan_table, planned_for, run_words, train_command
    from lowmem_ft.reports.text.document import Command, Document

    output = Output(options.json)
    reason = _why_this_gpu(recipe, options)
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
        output.add(another_plan(plan, options.asked, options.devices))
    output.write_json(values)
    return 0 if plan.fits else EXIT_DOES_NOT_FIT


def _why_this_gpu(recipe: Recipe, options: argparse.Namespace) -> str:
    """Return which GPU of the catalogue was chosen for a budget; empty for a named GPU or this machine's."""
    from lowmem_ft.planning.estimator.device_target import choose_gpu

    is_of_budget = options.gpu is None and recipe.budget.device is not None
    gpu, reason = (
        choose_gpu(None, recipe.budget, use_cpu=recipe.training.use_cpu) if is_of_budget else (None, "")
    )
    return f"D{reason[1:]}" if gpu is not None else ""


def _length_or_problem(recipe: Recipe, step: StepTime) -> RunLength | str | None:
    """Return the run's length, or why it is unknown; None if its data is not on this machine, or streamed."""
    from lowmem_ft.data.sources.files import local_files
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


def _check(options: argparse.Namespace) -> None:
    problems = [*gpu_problems(options.gpu), *own_data_problems(options)]
    if options.gpu is not None and options.gpu.strip().lower() == ALL_GPUS:
        problems.append(
            "A plan is for one GPU, got --gpu all. Name one, such as --gpu rtx-4090, or a budget."
        )
    if options.max_gpus not in (None, "1", "2", "4", "8"):
        problems.append(
            f"--max-gpus is a number of GPUs, 1, 2, 4 or 8, got {options.max_gpus}. Try --max-gpus 8, which tries the "
            "smaller numbers first, or leave it out."
        )
    problems += file_problems(options, "write", "json")
    if options.write is not None and Path(options.write).suffix not in (".yaml", ".yml"):
        problems.append(f"--write names a recipe file, which ends in .yaml, got {options.write}.")
    raise_problems(problems)


def _parser() -> Parser:
    parser = Parser(
        prog="lowmem-ft plan",
        usage=_USAGE,
        description="Choose the memory settings with which a step is fastest inside a budget of device and host "
        "memory, and say why.",
        epilog=_EXAMPLES,
        allow_abbrev=False,
    )
    parser.add_once(
        {
            "--gpu NAME": "a GPU of `lowmem-ft gpus`, or cpu; without: this machine's GPU, or one of the budget's size",
            "--max-gpus N": "if one GPU is not enough, try 2, 4, ... up to N of them, at most 8, that share the recipe",
            "--write FILE.yaml": "write the plan as a recipe that is ready to train",
            "--json FILE|-": "write the plan as JSON; - is stdout, then JSON alone",
        }
    )
    add_own_data(parser)
    parser.add_without_packages()
    parser.add_overwrite()
    return parser
