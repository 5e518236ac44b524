"""``lowmem-ft estimate model=NAME``: where a model can be fine-tuned at all, and by which method."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowmem_ft.cli.estimate_files import report_console, write_json
from lowmem_ft.cli.estimate_options import ALL_GPUS, CPU, names_model_alone
from lowmem_ft.cli.progress import progress_line
from lowmem_ft.errors import EXIT_DOES_NOT_FIT, UserError

if TYPE_CHECKING:
    from lowmem_ft.catalog.gpu import Gpu
    from lowmem_ft.estimator import MethodEstimate
    from lowmem_ft.recipe import Recipe


def refuse_pictures(recipe: Recipe, options: argparse.Namespace) -> None:
    """Refuse to draw a model alone.

    Raises:
        UserError: if a picture is asked for.
    """
    model = recipe.model.name_or_path
    if options.gpu != CPU and (options.plot is not None or options.snapshot is not None):
        raise UserError(
            f"--plot and --snapshot show one run, got model={model} alone, which is estimated in three ways. "
            f"Name one of them, such as {shlex.join(['recipe=7b-lora', f'model={model}'])}."
        )


def gpus_asked_for(recipe: Recipe, options: argparse.Namespace) -> list[Gpu]:
    """All of the catalogue, or one; none if it is this machine's processor."""
    from lowmem_ft.catalog.gpus import load_gpus
    from lowmem_ft.estimator.target import choose_gpu

    if options.gpu == ALL_GPUS:
        return list(load_gpus().values())
    gpu, _ = choose_gpu(options.gpu, recipe.budget, use_cpu=False)
    return [] if gpu is None else [gpu]


def estimate_model(
    recipe: Recipe, settings: Sequence[str], gpus: Sequence[Gpu], options: argparse.Namespace
) -> int:
    """Report what a model alone needs by each method.

    Args:
        recipe: of the settings, for the model's name.
        settings: as typed: the model, and perhaps a budget.
        gpus: at least one.
        options: of the command.

    Returns:
        The exit code: 0 if something fits, else 3.

    Raises:
        UserError: if no method can be estimated on any GPU.
    """
    from lowmem_ft.catalog.gpus import load_gpus
    from lowmem_ft.estimator import estimate_methods
    from lowmem_ft.estimator.kept_traces import KeptTraces
    from lowmem_ft.reports.method_table import methods_on_gpu, methods_on_gpus
    from lowmem_ft.reports.wording import short_name

    model = recipe.model.name_or_path or ""
    is_all = options.gpu == ALL_GPUS
    short = short_name(model)
    with progress_line(f"{short}: reading its architecture") as say:
        results = estimate_methods(
            model,
            gpus,
            settings=[setting for setting in settings if not names_model_alone([setting], just_name=True)],
            float32_streaming=not is_all,
            kept=KeptTraces.of_user(),
            on_start=lambda doing: say(f"{short}: {doing}: running one step on a virtual GPU"),
        )
    problems = {problem: None for result in results for problem in result.problems}
    if not any(result.estimate for result in results):
        raise UserError(*problems)
    console = report_console(options)
    console.print(methods_on_gpus(results, load_gpus()) if is_all else methods_on_gpu(results, gpus[0]))
    _write_json(results, options)
    return 0 if any(result.fits for result in results) else EXIT_DOES_NOT_FIT


def _write_json(results: Sequence[MethodEstimate], options: argparse.Namespace) -> None:
    from lowmem_ft.memory.estimate import SCHEMA

    values = {
        "schema": SCHEMA,
        "estimates": [
            {"method": result.method.name, "settings": list(result.command), **result.estimate.to_json()}
            for result in results
            if result.estimate is not None
        ],
        "cannot_run": [
            {"method": result.method.name, "gpu": result.gpu.name, "reason": " ".join(result.problems)}
            for result in results
            if result.estimate is None
        ],
    }
    write_json(values, options)
