"""``lowmem-ft estimate recipe=NAME``: what a recipe needs on one GPU or on all, and the changes that make it fit."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowmem_ft.cli.console.output import Output
from lowmem_ft.cli.console.spinner import progress_line
from lowmem_ft.cli.estimating.estimate_files import write_pictures
from lowmem_ft.cli.estimating.estimate_model import OF_DEFAULTS, estimate_model, gpus_asked_for
from lowmem_ft.cli.estimating.estimate_options import ALL_GPUS, CPU, FOR_THE_PROCESSOR, NO_SNAPSHOT_OF_CPU
from lowmem_ft.cli.estimating.lengths_that_fit import longest_rows_of_model, longest_rows_of_recipe
from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.foundation.catalog.timed_steps import with_seconds_here
from lowmem_ft.foundation.errors import EXIT_DOES_NOT_FIT, UserError
from lowmem_ft.foundation.memory.memory_estimate import SCHEMA, MemoryEstimate
from lowmem_ft.foundation.system.interrupts import defer_signals
from lowmem_ft.planning.estimator import estimate_memory, estimate_on_gpus, estimate_on_several
from lowmem_ft.planning.estimator.changes import Change, Changes, ChangeSearch
from lowmem_ft.planning.estimator.device_target import choose_gpu
from lowmem_ft.planning.estimator.fitting_shipped_recipe import ShippedRecipe, shipped_recipe_that_fits
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.planning.planner import plan_checkpointing
from lowmem_ft.planning.planner.automatic_checkpointing import chosen_in_words
from lowmem_ft.planning.planner.outlook import outlook_for
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.request.request import Request
from lowmem_ft.recipe.shipped.needs import needs_of_shipped_recipes
from lowmem_ft.reports.costs import OwnData, row_tokens_of, with_cost
from lowmem_ft.reports.estimate_table import changes_table, estimate_table, shipped_table, way_to_a_plan
from lowmem_ft.reports.estimate_words import short_name
from lowmem_ft.reports.gpu_table import by_cost, gpu_table, several_table
from lowmem_ft.reports.text.document import Document
from lowmem_ft.virtual_gpu.replay.trace_estimate import allocator_config_of_runs


def report_needs(request: Request, options: argparse.Namespace) -> int:
    """Report what a recipe needs on one GPU or on all, or a model by each method, or the longest rows that fit.

    Args:
        request: the question.
        options: the command's.

    Returns:
        The exit code: 0 if it fits (on one GPU at least); 3 if it does not, or may not.

    Raises:
        UserError: if it cannot be estimated.
    """
    if request.is_by_method:
        gpus = gpus_asked_for(request)
        if gpus and options.longest_rows:
            return longest_rows_of_model(request, gpus[0], options)
        if gpus:
            return estimate_model(request, gpus, options)
        request = request.on_processor()
    if options.longest_rows:
        return longest_rows_of_recipe(request, options)
    return (_estimate_on_all if request.gpu == ALL_GPUS else _estimate_on_one)(request, options)


def _estimate_on_one(request: Request, options: argparse.Namespace) -> int:
    recipe = request.recipe
    target, _ = choose_gpu(request.gpu, recipe.budget, use_cpu=recipe.training.use_cpu)
    if target is None and options.snapshot is not None:
        raise UserError(NO_SNAPSHOT_OF_CPU)
    chosen: list[str] = []
    if recipe.checkpointing.mode == "auto":
        recipe, words = _with_layers_chosen(recipe, request.gpu)
        chosen.append(words)
    try:
        with progress_line(_tracing(recipe)):
            estimate = estimate_memory(recipe, request.gpu, kept=KeptTraces.of_user())
            estimate = with_seconds_here(estimate, torch.get_num_threads())
    except UserError as error:
        if target is None and request.gpu is None:
            raise UserError(*error.problems, FOR_THE_PROCESSOR) from error
        raise
    estimate = dataclasses.replace(estimate, choices=(*chosen, *estimate.choices))
    gpu = load_gpus().get(estimate.gpu.name)
    output = Output(options.json)
    own_data, row_tokens = OwnData.of_words(options.rows, options.epochs), row_tokens_of(recipe, estimate)
    output.add(
        estimate_table(
            estimate,
            gpu.cheapest_price if gpu else None,
            of_data="" if own_data is None else own_data.run_in_words(estimate, gpu, row_tokens),
        )
    )
    output.add(OF_DEFAULTS if request.recipe_name is None else None)
    if request.gpu is None and estimate.is_of_cpu:
        needs = needs_of_shipped_recipes().get(recipe.name)
        hint = (
            f" {recipe.name} is made for --gpu {needs.gpu}." if needs is not None and needs.gpu != CPU else ""
        )
        output.add(FOR_THE_PROCESSOR + hint)
    write_pictures(estimate, options, allocator_config_of_runs(target))
    request = dataclasses.replace(request, recipe=recipe)
    return _conclude(
        [estimate], with_cost(estimate, gpu, own_data, row_tokens), request.gpu, request, options, output
    )


def _with_layers_chosen(recipe: Recipe, gpu: str | None) -> tuple[Recipe, str]:
    """Return the recipe with the checkpointed layers chosen, and a sentence about them."""
    with progress_line("choosing the checkpointed layers") as say:
        found = plan_checkpointing(
            recipe,
            gpu=gpu,
            on_progress=lambda progress: say(f"choosing the checkpointed layers: {progress.estimated} tried"),
        )
    return found.recipe, chosen_in_words(found)


def _estimate_on_all(request: Request, options: argparse.Namespace) -> int:
    recipe, gpus, kept = request.recipe, load_gpus(), KeptTraces.of_user()
    with progress_line(_tracing(recipe)):
        results = estimate_on_gpus(recipe, list(gpus.values()), kept=kept)
    estimates = by_cost([result for result in results if isinstance(result, MemoryEstimate)], gpus)
    refusals = [result for result in results if not isinstance(result, MemoryEstimate)]
    cannot_run = {refusal.gpu.name: " ".join(refusal.problems) for refusal in refusals}
    output = Output(options.json)
    own_data, row_tokens = OwnData.of_words(options.rows, options.epochs), row_tokens_of(recipe, *estimates)
    output.add(gpu_table(estimates, gpus, cannot_run, own_data, row_tokens))
    with progress_line(f"{_name(recipe)}: trying several GPUs") as say:
        several = estimate_on_several(
            recipe,
            [gpus[estimate.gpu.name] for estimate in estimates if not estimate.fits],
            kept=kept,
            on_number=lambda number: say(f"{_name(recipe)}: trying {number} GPUs of one type"),
        )
    if several.tried or several.problems:
        output.add(several_table(several, gpus, own_data, row_tokens))

    def in_json(estimate: MemoryEstimate) -> dict[str, Any]:
        return with_cost(estimate, gpus[estimate.gpu.name], own_data, row_tokens)

    values = {
        "schema": SCHEMA,
        "estimates": [in_json(estimate) for estimate in estimates],
        "several_cards": {
            "tried": several.tried,
            "estimates": [in_json(estimate) for estimate in by_cost(several.estimates, gpus)],
            "problems": several.problems,
        },
        "cannot_run": [{"gpu": gpu, "reason": reason} for gpu, reason in cannot_run.items()],
    }
    return _conclude(estimates, values, _nearest(estimates).gpu.name, request, options, output)


def _conclude(
    estimates: Sequence[MemoryEstimate],
    values: dict[str, Any],
    gpu: str | None,
    request: Request,
    options: argparse.Namespace,
    output: Output,
) -> int:
    """Write the JSON and return the exit code; if nothing fits, first print the changes that would make it fit."""
    fits = any(estimate.fits for estimate in estimates)
    changes = shipped = None
    is_hopeless = False
    if not fits and _is_search_wanted(options):
        name = _nearest(estimates).gpu.name

        def tell(found: ShippedRecipe) -> None:
            nonlocal shipped
            shipped = found
            output.add(shipped_table(found, name))

        changes = _search(request.recipe, gpu, tell)
        is_hopeless = len(estimates) == 1 and changes.complete and not changes.fitting
        output.add(changes_table(changes, name))
    elif not fits:
        output.add(
            "With --changes: search for the cheapest changes that make it fit, which takes a few minutes."
        )
    if not fits:
        devices = None if request.devices == ALL_GPUS else request.devices
        plan = way_to_a_plan(request.words, request.recipe, _nearest(estimates), devices)
        output.add(Document(plan, "See other GPUs with --gpu all." if is_hopeless else None, gap=0))
    if options.changes:
        values = {
            **values,
            "changes": None if changes is None else changes.to_json(),
            "shipped_recipe": None if shipped is None else shipped.to_json(),
        }
    output.write_json(values)
    return 0 if fits else EXIT_DOES_NOT_FIT


def _is_search_wanted(options: argparse.Namespace) -> bool:
    """Return whether to search for changes: by default not with JSON, as a script waits only for what it asked for."""
    return options.json is None if options.changes is None else options.changes


def _search(recipe: Recipe, gpu: str | None, tell: Callable[[ShippedRecipe], None]) -> Changes:
    """Return the changes found before the search or the user ended it; first ``tell`` a shipped recipe that fits."""
    kept = KeptTraces.of_user()
    found: list[Change] = []

    def before_an_estimate(made: int) -> None:
        raise_if_lost()
        say(f"searching for changes: {made} tried, {len(found)} found; Ctrl-C ends it")

    search: ChangeSearch | None = None
    with defer_signals() as raise_if_lost:
        try:
            outlook = outlook_for(recipe, gpu)
            search = ChangeSearch(recipe, gpu, kept=kept, on_estimate=before_an_estimate, outlook=outlook)
            with progress_line(f"{_name(recipe)}: looking for a shipped recipe that fits"):
                shipped = shipped_recipe_that_fits(recipe, gpu, kept=kept, outlook=outlook)
            if shipped is not None:
                tell(shipped)
            with progress_line(f"{_name(recipe)}: searching for changes that make it fit") as say:
                for change in search:
                    found.append(change)
        except KeyboardInterrupt:
            nothing = Changes(fitting=(), all_together=None, complete=False)
            return nothing if search is None else search.found(complete=False)
    return search.found(complete=True)


def _nearest(estimates: Sequence[MemoryEstimate]) -> MemoryEstimate:
    """Return the estimate with the most memory left, or the least missing."""
    return max(estimates, key=lambda estimate: estimate.headroom_bytes or 0)


def _tracing(recipe: Recipe) -> str:
    return f"{_name(recipe)}: running one step on a virtual GPU"


def _name(recipe: Recipe) -> str:
    return short_name(recipe.model.name_or_path or "")
