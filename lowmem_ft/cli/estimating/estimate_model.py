"""``lowmem-ft estimate model=NAME [key=value ...]``: the GPUs and methods with which a model can be fine-tuned."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from lowmem_ft.cli.console.output import Output
from lowmem_ft.cli.console.spinner import progress_line
from lowmem_ft.cli.estimating.estimate_options import ALL_GPUS
from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import EXIT_DOES_NOT_FIT, UserError
from lowmem_ft.foundation.memory.memory_estimate import SCHEMA
from lowmem_ft.planning.estimator import MethodEstimate, estimate_methods
from lowmem_ft.planning.estimator.device_target import choose_gpu
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.recipe.request.request import Request
from lowmem_ft.reports.costs import OwnData, with_cost
from lowmem_ft.reports.estimate_table import way_to_a_plan
from lowmem_ft.reports.estimate_words import short_name
from lowmem_ft.reports.method_table import methods_on_gpu, methods_on_gpus, train_words
from lowmem_ft.reports.text.document import Document

MODEL_NAMES = ("model", "model.name_or_path")
"""Keys that name a model."""

OF_DEFAULTS = (
    "No recipe was named: settings that were not given have their defaults, such as float32 weights without "
    "checkpointing. recipe=NAME takes the settings of a shipped recipe; with --gpu NAME each training method is "
    "estimated."
)


def gpus_asked_for(request: Request) -> list[Gpu]:
    """Return all GPUs of the catalogue, or one; empty if it is this machine's processor."""
    if request.gpu == ALL_GPUS:
        return list(load_gpus().values())
    gpu, _ = choose_gpu(request.gpu, request.recipe.budget, use_cpu=False)
    return [] if gpu is None else [gpu]


def estimate_model(request: Request, gpus: Sequence[Gpu], options: argparse.Namespace) -> int:
    """Report what a model without a recipe needs by each method that its settings leave open.

    Args:
        request: the question.
        gpus: at least one.
        options: the command's.

    Returns:
        The exit code: 0 if something fits, else 3.

    Raises:
        UserError: if no method can be estimated on any GPU.
    """
    model = request.recipe.model.name_or_path or ""
    is_all = request.gpu == ALL_GPUS
    short = short_name(model)
    others = [each for each in request.settings if each.partition("=")[0] not in MODEL_NAMES]
    with progress_line(f"{short}: reading its architecture") as say:
        results = estimate_methods(
            model,
            gpus,
            settings=others,
            count=request.num_gpus,
            is_thorough=not is_all,
            kept=KeptTraces.of_user(),
            on_start=lambda doing: say(f"{short}: {doing}"),
        )
    problems = {problem: None for result in results for problem in result.problems}
    if not any(result.estimate for result in results):
        raise UserError(*problems)
    output = Output(options.json)
    own_data = OwnData.of_words(options.rows, options.epochs)
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
        plan = way_to_a_plan(command, nearest.recipe, nearest.estimate, nearest.devices)
        output.add(Document(plan, None if is_all else "See other GPUs with --gpu all.", gap=0))
    output.write_json(_as_json(results, own_data))
    return 0 if fits else EXIT_DOES_NOT_FIT


def _placement_in_json(result: MethodEstimate) -> dict[str, Any]:
    engine, count = result.placement.engine, result.placement.count
    return {} if engine is None else {"strategy": engine, "num_processes": count}


def _as_json(results: Sequence[MethodEstimate], own_data: OwnData | None) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "estimates": [
            {
                "method": result.method.name,
                "recipe": result.rung,
                "settings": list(result.command),
                "train": train_words(result),
                **with_cost(result.estimate, result.gpu, own_data, result.row_tokens),
            }
            for result in results
            if result.estimate is not None
        ],
        "cannot_run": [
            {
                "method": result.method.name,
                "gpu": result.gpu.name,
                **_placement_in_json(result),
                "reason": " ".join(result.problems),
            }
            for result in results
            if result.estimate is None
        ],
    }
