"""A plan of the memory settings: its search, its report, and the recipe that it writes."""

from __future__ import annotations

import argparse
import dataclasses
import shlex

from lowmem_ft.cli.console.output import Output, writing
from lowmem_ft.cli.console.spinner import progress_line
from lowmem_ft.data.files.files import local_files
from lowmem_ft.data.sources.listed import listed_sources
from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.foundation.errors import EXIT_DOES_NOT_FIT, UserError
from lowmem_ft.foundation.memory.memory_estimate import StepTime
from lowmem_ft.foundation.user_paths import expand_user
from lowmem_ft.planning import planner
from lowmem_ft.planning.estimator.device_target import choose_gpu
from lowmem_ft.planning.planner import MemoryPlan, PlanProgress
from lowmem_ft.planning.planner.run_length import RunLength, run_length
from lowmem_ft.recipe import Recipe, recipe_to_yaml
from lowmem_ft.recipe.command_lines import launched
from lowmem_ft.recipe.request.plan_defaults import named_as_planned
from lowmem_ft.recipe.request.request import Request
from lowmem_ft.reports.costs import OwnData, row_tokens_of, with_cost
from lowmem_ft.reports.estimate_words import short_name
from lowmem_ft.reports.plan_table import another_plan, plan_table, planned_for, run_words, train_command
from lowmem_ft.reports.text.document import Command, Document


def plan_memory(request: Request, options: argparse.Namespace) -> int:
    """Plan a recipe, and report the plan; write it if the user asked for that.

    Args:
        request: the question.
        options: the command's.

    Returns:
        The exit code: 0 if the plan fits, else 3.
    """
    recipe = request.recipe
    with progress_line(f"{short_name(recipe.model.name_or_path or '')}: planning") as say:
        found = planner.plan(
            recipe,
            gpu=request.gpu,
            max_gpus=int(options.max_gpus or 1),
            on_progress=lambda progress: say(_words(progress)),
        )
    where = [place for place in (recipe.budget.device, request.gpu) if place is not None]
    named = named_as_planned(
        found.recipe, request.settings, *(where or [found.estimate.gpu.name.partition(" ")[0]])
    )
    return _report(dataclasses.replace(found, recipe=named), request, options)


def _shared(recipe: Recipe) -> list[str]:
    """Return the settings by which several processes share the model; empty for one process."""
    config = recipe.distributed
    if config.num_processes in (None, 1):
        return []
    strategy = [] if config.strategy is None else [f"distributed.strategy={config.strategy}"]
    return [*strategy, f"distributed.num_processes={config.num_processes}"]


def _words(progress: PlanProgress) -> str:
    """Return the progress of a search in less than 80 columns, with how to end it last."""
    best = progress.best
    found = "nothing fits yet" if best is None else "one fits"
    if best is not None and best.step is not None:
        found = f"{best.step.seconds:.3g} s a step so far"
    return f"planning: {progress.estimated} of {progress.combinations:,} tried, {found}; Ctrl-C ends it"


def _report(plan: MemoryPlan, request: Request, options: argparse.Namespace) -> int:
    output, recipe = Output(options.json), request.recipe
    command = [*request.words, *_shared(recipe)] if request.recipe_name else None
    reason = _why_this_gpu(request)
    output.add(
        Document(f"{reason}; --gpu NAME takes another." if reason else None, plan_table(plan, recipe), gap=0)
    )
    values = plan.to_json()
    gpu, own_data = load_gpus().get(plan.estimate.gpu.name), OwnData.of_words(options.rows, options.epochs)
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
    recipe = request.recipe
    is_of_budget = request.gpu is None and recipe.budget.device is not None
    gpu, reason = (
        choose_gpu(None, recipe.budget, use_cpu=recipe.training.use_cpu) if is_of_budget else (None, "")
    )
    return f"D{reason[1:]}" if gpu is not None else ""


def _length_or_problem(recipe: Recipe, step: StepTime) -> RunLength | str | None:
    """Return the run's length, or why it is unknown; None if its data is not on this machine, or streamed."""
    paths = [one.path for one in listed_sources(recipe.data)]
    if not paths or recipe.data.streaming:
        return None
    try:
        is_here = all(local_files(path) or expand_user(path).is_dir() for path in paths)
        return run_length(recipe, step) if is_here else None
    except UserError as error:
        return f"The length of the run is unknown: {' '.join(error.problems)}"
