"""``lowmem-ft estimate ... --longest-rows``: the longest rows that fit, by a recipe, by each method, or by a script."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lowmem_ft.cli.console.output import Output
from lowmem_ft.cli.console.spinner import progress_line
from lowmem_ft.cli.estimating.estimate_model import MODEL_NAMES
from lowmem_ft.cli.estimating.estimate_options import ROWS_NEED_GPU, length_argument, steps_of
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import EXIT_DOES_NOT_FIT, UserError
from lowmem_ft.foundation.memory.memory_estimate import SCHEMA, MemoryEstimate
from lowmem_ft.planning.estimator import estimate_methods
from lowmem_ft.planning.estimator.device_target import choose_gpu
from lowmem_ft.planning.estimator.longest_rows import (
    FIRST_TOKENS,
    MOST_TOKENS,
    LongestRows,
    longest_rows,
    most_tokens,
    search_length,
)
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.planning.script_runs import estimate_script
from lowmem_ft.recipe.command_lines import launched
from lowmem_ft.recipe.request.request import Request
from lowmem_ft.recipe.shipped.fine_tuning_methods import methods_with, recipe_of
from lowmem_ft.recipe.space.search_space import with_settings
from lowmem_ft.reports.estimate_words import short_name
from lowmem_ft.reports.longest_rows_table import length_table, length_words
from lowmem_ft.reports.text.document import Command, Document

_LENGTH = "data.max_length"


def longest_rows_of_recipe(request: Request, options: argparse.Namespace) -> int:
    """Report the longest rows with which a recipe fits.

    Args:
        request: the question.
        options: the command's.

    Returns:
        The exit code: 0 if some rows fit, else 3.

    Raises:
        UserError: if the recipe cannot be estimated, or it is for a processor.
    """
    recipe = request.recipe
    gpu, _ = choose_gpu(request.gpu, recipe.budget, use_cpu=recipe.training.use_cpu)
    if gpu is None:
        raise UserError(ROWS_NEED_GPU)
    name = short_name(recipe.model.name_or_path or "")
    with progress_line(f"{name}: the longest rows that fit") as say:
        found = longest_rows(
            recipe, gpu, kept=KeptTraces.of_user(), on_estimate=functools.partial(_tell, say, name)
        )
    output = Output(options.json)
    output.add(Document(f"{name} on {gpu.name}. {length_words(found)}", length_table(found)))
    output.write_json(_in_json(gpu.name, found))
    return 0 if found.tokens else EXIT_DOES_NOT_FIT


def longest_rows_of_model(request: Request, gpu: Gpu, options: argparse.Namespace) -> int:
    """Report the longest rows that fit by each method, with the settings that need the least memory.

    Args:
        request: the question.
        gpu: the GPU.
        options: the command's.

    Returns:
        The exit code: 0 if some rows fit by some method, else 3.

    Raises:
        UserError: if no method can be estimated.
    """
    model, kept = request.recipe.model.name_or_path or "", KeptTraces.of_user()
    name = short_name(model)
    first = methods_with(request.settings)[0]
    others = [each for each in request.settings if each.partition("=")[0] not in (*MODEL_NAMES, _LENGTH)]
    most = most_tokens(recipe_of((f"recipe={first.rungs[0]}", f"model={model}", *others)))
    with progress_line(f"{name}: the settings that leave the most room") as say:
        results = estimate_methods(
            model,
            [gpu],
            settings=[*others, f"{_LENGTH}={most}"],
            count=request.num_gpus,
            kept=kept,
            on_start=lambda doing: say(f"{name}: {doing}"),
        )
        parts: list[Any] = []
        in_json: list[dict[str, Any]] = []
        for result in results:
            if result.estimate is None:
                parts.append(f"{result.title}: {' '.join(result.problems)}")
                continue
            recipe = with_settings(result.recipe, {_LENGTH: min(FIRST_TOKENS, most)})
            tell = functools.partial(_tell, say, f"{name}, {result.title}")
            found = longest_rows(recipe, gpu, kept=kept, on_estimate=tell)
            command = [each for each in result.command if each.partition("=")[0] != _LENGTH]
            parts.append(f"{result.title}: {length_words(found)}")
            if found.tokens:
                words = (*launched(result.recipe), *command, f"{_LENGTH}={found.tokens}")
                parts.append(Command(*words))
            in_json.append({"method": result.method.name, "settings": command, **_in_json(gpu.name, found)})
    if not in_json:
        raise UserError(*dict.fromkeys(problem for result in results for problem in result.problems))
    output = Output(options.json)
    devices = results[0].devices
    output.add(Document(f"{name} on {devices}: the longest rows that fit", Document(*parts, gap=0)))
    output.write_json({"longest_rows": in_json})
    return 0 if any(each["tokens"] for each in in_json) else EXIT_DOES_NOT_FIT


def longest_rows_of_script(
    path: Path,
    arguments: Sequence[str],
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> Callable[[], int]:
    """Run a script with other values of its length until the longest rows that fit are known; return the report.

    Args:
        path: the script.
        arguments: its own, with one for the tokens of a row.
        options: the command's.
        say: shows what is being done.

    Raises:
        UserError: as :func:`length_argument`; if the script cannot be estimated, or the answer is for a processor.
    """
    place, first, before = length_argument(arguments)
    names: list[str] = []

    def estimate_at(tokens: int) -> MemoryEstimate:
        words = [*arguments[:place], f"{before}{tokens}", *arguments[place + 1 :]]
        found = estimate_script(
            path, words, gpu=options.gpu, steps=steps_of(options), accelerate_config=options.accelerate_config
        ).estimate
        if found.is_of_cpu:
            raise UserError(ROWS_NEED_GPU)
        names.append(found.gpu.name)
        return found

    found = search_length(
        estimate_at, first=first, most=MOST_TOKENS, on_estimate=functools.partial(_tell, say, path.name)
    )
    is_flat = len({size for _, size in found.process_bytes}) == 1 < len(found.process_bytes)
    if found.over_tokens is None and is_flat:
        raise UserError(
            f"--longest-rows changes the script's own argument for the tokens of a row, and {arguments[place]} changes "
            f"nothing: the peak is the same with {found.process_bytes[0][0]:,} and {found.process_bytes[-1][0]:,} "
            "tokens. Name the argument that the script goes by."
        )

    def report() -> int:
        output = Output(options.json)
        output.add(Document(f"{path.name} on {names[0]}. {length_words(found)}", length_table(found)))
        output.write_json(_in_json(names[0], found))
        return 0 if found.tokens else EXIT_DOES_NOT_FIT

    return report


def _tell(say: Callable[[str], None], name: str, number: int, tokens: int) -> None:
    say(f"{name}: the longest rows that fit: estimate {number + 1}, {tokens:,} tokens")


def _in_json(gpu: str, found: LongestRows) -> dict[str, Any]:
    return {"schema": SCHEMA, "gpu": gpu, **found.to_json()}
