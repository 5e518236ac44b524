"""``lowmem-ft estimate model=NAME [key=value ...]``: the GPUs and methods with which a model can be fine-tuned."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lowmem_ft.cli.console.output import Output
from lowmem_ft.cli.console.spinner import progress_line
from lowmem_ft.cli.estimating.estimate_options import ALL_GPUS, CPU, own_data_of
from lowmem_ft.foundation.errors import EXIT_DOES_NOT_FIT, UserError, raise_problems
from lowmem_ft.foundation.packages import may_have_gpu

if TYPE_CHECKING:
    from lowmem_ft.foundation.catalog.gpu_spec import Gpu
    from lowmem_ft.planning.estimator import MethodEstimate
    from lowmem_ft.recipe import Recipe
    from lowmem_ft.reports.costs import OwnData

MODEL_NAMES = ("model", "model.name_or_path")
"""Keys that name a model."""

OF_DEFAULTS = (
    "No recipe was named: settings that were not given have their defaults, such as float32 weights without "
    "checkpointing. recipe=NAME takes the settings of a shipped recipe; with --gpu NAME each training method is "
    "estimated."
)


def is_for_processor(settings: Sequence[str], options: argparse.Namespace) -> bool:
    """Return whether settings without a recipe are surely for this machine's processor; only torch knows of its GPU."""
    from lowmem_ft.recipe.shipped.fine_tuning_methods import values_of

    values = values_of(settings)
    if options.gpu == CPU or values.get("training.use_cpu", "").lower() in ("true", "yes", "on"):
        return True
    return options.gpu is None and "budget.device" not in values and not may_have_gpu()


def check_model_alone(recipe: Recipe, settings: Sequence[str], options: argparse.Namespace) -> None:
    """Raise an error for requests that need a recipe.

    Args:
        recipe: built from the model's name alone.
        settings: as typed.
        options: the command's.

    Raises:
        UserError: for a picture, several GPUs or chosen layers, or if no method goes with the settings.
    """
    from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu, split_count
    from lowmem_ft.recipe.rules.device_checks import check_device_of_estimate
    from lowmem_ft.recipe.rules.path_checks import check_sizes_of_model
    from lowmem_ft.recipe.shipped.fine_tuning_methods import LORA, check_methods, methods_with, values_of

    model, methods = recipe.model.name_or_path, methods_with(settings)
    named = shlex.join([f"recipe={(LORA if LORA in methods else methods[0]).rungs[0]}", f"model={model}"])
    count = None if options.gpu in (None, ALL_GPUS) else split_count(options.gpu)[0]
    problems = []
    if options.plot is not None or options.snapshot is not None:
        problems.append(
            f"--plot and --snapshot show one run, got model={model} without a recipe, for which each training method "
            f"is estimated. Name one, such as {named}."
        )
    if count not in (None, 1):
        problems.append(
            f"A model without a recipe is estimated on one GPU, got {options.gpu}. Name a recipe, such as "
            f"{shlex.join([f'recipe={methods[0].shared}', f'model={model}'])}, or run `lowmem-ft plan` with the same "
            "arguments."
        )
    if values_of(settings).get("checkpointing.mode") == "auto":
        problems.append(
            f"checkpointing.mode=auto needs a recipe, got model={model} without one. Name one, such as {named}."
        )
    if options.changes:
        problems.append(
            f"--changes needs a recipe, got model={model} without one. Name one, such as {named}."
        )
    raise_problems(problems)
    gpu = None if options.gpu in (None, ALL_GPUS) else find_gpu(split_count(options.gpu)[1])

    def check(of_method: Recipe) -> None:
        check_sizes_of_model(of_method)
        if gpu is not None:
            check_device_of_estimate(of_method, gpu)

    check_methods(settings, check, has_bfloat16=gpu is None or gpu.has_bfloat16)


def gpus_asked_for(recipe: Recipe, options: argparse.Namespace) -> list[Gpu]:
    """Return all GPUs of the catalogue, or one; empty if it is this machine's processor."""
    from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus, split_count
    from lowmem_ft.planning.estimator.device_target import choose_gpu

    if options.gpu == ALL_GPUS:
        return list(load_gpus().values())
    name = None if options.gpu is None else split_count(options.gpu)[1]
    gpu, _ = choose_gpu(name, recipe.budget, use_cpu=False)
    return [] if gpu is None else [gpu]


def estimate_model(
    recipe: Recipe, settings: Sequence[str], gpus: Sequence[Gpu], options: argparse.Namespace
) -> int:
    """Report what a model without a recipe needs by each method that its settings leave open.

    Args:
        recipe: for the model's name.
        settings: as typed.
        gpus: at least one.
        options: the command's.

    Returns:
        The exit code: 0 if something fits, else 3.

    Raises:
        UserError: if no method can be estimated on any GPU.
    """
    from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
    from lowmem_ft.planning.estimator import estimate_methods
    from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
    from lowmem_ft.recipe.shipped.fine_tuning_methods import recipe_of
    from lowmem_ft.reports.estimate_table import way_to_a_plan
    from lowmem_ft.reports.method_table import methods_on_gpu, methods_on_gpus
    from lowmem_ft.reports.text.document import Document
    from lowmem_ft.reports.wording import short_name

    model = recipe.model.name_or_path or ""
    is_all = options.gpu == ALL_GPUS
    short = short_name(model)
    others = [each for each in settings if each.partition("=")[0] not in MODEL_NAMES]
    with progress_line(f"{short}: reading its architecture") as say:
        results = estimate_methods(
            model,
            gpus,
            settings=others,
            is_thorough=not is_all,
            kept=KeptTraces.of_user(),
            on_start=lambda doing: say(f"{short}: {doing}"),
        )
    problems = {problem: None for result in results for problem in result.problems}
    if not any(result.estimate for result in results):
        raise UserError(*problems)
    output = Output(options.json)
    own_data = own_data_of(options)
    output.add(
        methods_on_gpus(results, load_gpus(), own_data)
        if is_all
        else methods_on_gpu(results, gpus[0], own_data)
    )
    fits = any(result.fits for result in results)
    if not fits:
        nearest = max(
            (result for result in results if result.estimate is not None),
            key=lambda result: (result.estimate and result.estimate.headroom_bytes) or 0,
        )
        assert nearest.estimate is not None
        command = nearest.command
        plan = way_to_a_plan(command, recipe_of(command), nearest.estimate, nearest.gpu.name)
        output.add(Document(plan, None if is_all else "See other GPUs with --gpu all.", gap=0))
    output.write_json(_as_json(results, own_data))
    return 0 if fits else EXIT_DOES_NOT_FIT


def _as_json(results: Sequence[MethodEstimate], own_data: OwnData | None) -> dict[str, Any]:
    from lowmem_ft.foundation.memory.memory_estimate import SCHEMA
    from lowmem_ft.reports.costs import with_cost

    return {
        "schema": SCHEMA,
        "estimates": [
            {
                "method": result.method.name,
                "recipe": result.rung,
                "settings": list(result.command),
                **with_cost(result.estimate, result.gpu, own_data, result.row_tokens),
            }
            for result in results
            if result.estimate is not None
        ],
        "cannot_run": [
            {"method": result.method.name, "gpu": result.gpu.name, "reason": " ".join(result.problems)}
            for result in results
            if result.estimate is None
        ],
    }
