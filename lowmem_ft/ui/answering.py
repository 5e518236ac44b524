"""Answers to the page, in another process: the functions of the commands, with the settings of the page.

Each returns what is sent back to the page's own process: JSON types, and reports as HTML.
"""

from __future__ import annotations

import errno
import functools
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

if sys.platform != "win32":
    import resource

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu, load_gpus, split_count
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.units import GIB
from lowmem_ft.planning.estimator import MethodEstimate, estimate_memory, estimate_methods
from lowmem_ft.planning.estimator.device_target import choose_gpu
from lowmem_ft.planning.estimator.longest_rows import LongestRows, longest_rows
from lowmem_ft.planning.estimator.method_estimates import best_of
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.planning.planner import plan
from lowmem_ft.recipe import load_recipe, recipe_to_yaml
from lowmem_ft.recipe.command_lines import command_line, launched
from lowmem_ft.recipe.request.request import Request
from lowmem_ft.recipe.rules.budget_limits import refuse_budget_beyond_all
from lowmem_ft.recipe.shipped.fine_tuning_methods import unless_typed
from lowmem_ft.reports.costs import with_cost
from lowmem_ft.reports.estimate_table import facts, headline, labelled, uses
from lowmem_ft.reports.method_table import methods_on_gpu, methods_on_gpus
from lowmem_ft.reports.plan_table import plan_table, train_command
from lowmem_ft.reports.plots.memory_figure import memory_figure
from lowmem_ft.reports.plots.memory_svg import memory_svg
from lowmem_ft.reports.plots.svg import within_page
from lowmem_ft.reports.text.html_document import html_of, text_html
from lowmem_ft.training.run.data_inspection import inspect_data_of

DRAWN_WIDTHS = {"narrow": 380, "wide": 960}
"""Units across of the drawings of the timeline, for a phone and for a screen."""

MOST_MEMORY_BYTES = 32 << 30
"""The most bytes that the process may take, or all that the machine has: a config of absurd sizes ends the process and
not the machine."""

OnProgress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question of the page.

    Args:
        method: one of the methods, or ``recipe``.
        recipe: the recipe of that one.
        settings: settings of model, rows and budgets, see ``Form.settings``.
        of_method: the settings that name the method.
        devices: the GPUs as ``--gpu`` takes them; None: one of the budget's size.
    """

    method: str
    recipe: str
    settings: tuple[str, ...]
    of_method: tuple[str, ...]
    devices: str | None

    @property
    def model(self) -> str | None:
        """The model that the settings name; None: the recipe's own."""
        named = (setting.partition("=") for setting in self.settings)
        return next((value for key, _, value in named if key == "model"), None)


@functools.cache
def _kept() -> KeptTraces:
    return KeptTraces.of_user()


def estimate(asked: Asked, on_progress: OnProgress) -> dict[str, Any]:
    """Return one estimate: its JSON as of ``lowmem-ft estimate --json``, its command, recipe and script, and its views.

    Args:
        asked: the question.
        on_progress: called with a description of the current work.

    Raises:
        UserError: if the settings are wrong, or the GPU cannot run them.
    """
    request, gpu = _settled(asked, on_progress)
    on_progress("running one step on a virtual GPU")
    found = estimate_memory(request.recipe, gpu, kept=_kept())
    on_progress("drawing")
    figure = memory_figure(found)
    return {
        "values": with_cost(found, gpu),
        "command": _command("estimate", request, gpu),
        "train": shlex.join([*launched(request.recipe), *request.words]),
        "engines": _engines(asked, gpu),
        "recipe": recipe_to_yaml(request.recipe),
        "script": _script(request.words),
        "verdict": text_html(headline(found)),
        "uses": [[words, size] for words, size, _ in uses(found)],
        "facts": html_of(labelled(*facts(found, gpu.cheapest_price))),
        "timeline": {name: within_page(memory_svg(figure, width)) for name, width in DRAWN_WIDTHS.items()},
    }


def compare_methods(asked: Asked, on_progress: OnProgress) -> dict[str, Any]:
    """Return the table of all GPUs and methods, as ``lowmem-ft estimate model=NAME --gpu all`` prints it.

    Args:
        asked: the question; its GPU is not used.
        on_progress: called with a description of the current work.

    Raises:
        UserError: if no method can be estimated on any GPU.
    """
    model = asked.model
    if model is None:
        raise UserError(
            "GPUs and methods are compared for a model, got a recipe's own. Choose a model of the list."
        )
    gpus, others = load_gpus(), tuple(each for each in asked.settings if not each.startswith("model="))
    results = estimate_methods(
        model,
        list(gpus.values()),
        settings=others,
        is_thorough=False,
        kept=_kept(),
        on_start=lambda doing: on_progress(f"{doing}: running one step on a virtual GPU"),
    )
    if not any(result.estimate for result in results):
        raise UserError(*dict.fromkeys(problem for result in results for problem in result.problems))
    words = command_line("estimate", f"model={model}", *others, gpu="all")
    return {"command": shlex.join(words), "table": html_of(methods_on_gpus(results, gpus))}


def find_longest_rows(asked: Asked, on_progress: OnProgress) -> dict[str, Any]:
    """Return the length at which memory ends, and the same with one GiB more of device memory.

    Args:
        asked: the question.
        on_progress: called with a description of the current work.

    Raises:
        UserError: if the settings are wrong, or the GPU cannot run them.
    """
    request, gpu = _settled(asked, on_progress)

    def find(extra_bytes: int) -> LongestRows:
        with_more = " with 1 GiB more" if extra_bytes else ""

        def tell(number: int, tokens: int) -> None:
            on_progress(
                f"the length at which memory ends{with_more}: estimate {number + 1}, {tokens:,} tokens"
            )

        return longest_rows(request.recipe, gpu, extra_bytes=extra_bytes, kept=_kept(), on_estimate=tell)

    return {
        "command": _command("estimate", request, gpu),
        "now": find(0),
        "with_one_gib_more": find(GIB),
    }


def make_plan(asked: Asked, on_progress: OnProgress) -> dict[str, Any]:
    """Return the plan of ``lowmem-ft plan`` with its reasons, as HTML, with the recipe and the commands.

    Args:
        asked: the question.
        on_progress: called with the number of combinations tried.

    Raises:
        UserError: if the settings are wrong, or nothing runs on the GPU.
    """
    settled, gpu = _settled(asked, on_progress)
    request = Request.of("plan", settled.words, settled.devices or gpu.name)
    request.check()
    found = plan(
        request.recipe,
        gpu=request.gpu,
        on_progress=lambda progress: on_progress(
            f"planning: {progress.estimated} of {progress.combinations:,} combinations tried"
        ),
    )
    return {
        "command": _command("plan", request, gpu),
        "values": found.to_json(),
        "table": html_of(plan_table(found, request.recipe)),
        "train": shlex.join([*train_command(found, request.words), "data=YOUR_DATA"]) if found.fits else "",
        "recipe": recipe_to_yaml(found.recipe) if found.fits else "",
    }


def measure_rows(asked: Asked, data: Path, tokenizer: Path, on_progress: OnProgress) -> dict[str, Any]:
    """Return the rows and tokens of a data file, as ``lowmem-ft data`` counts them.

    Args:
        asked: the question, for its model.
        data: the file.
        tokenizer: the folder of a ``tokenizer.json``.
        on_progress: called with a description of the current work.

    Raises:
        UserError: if either cannot be read.
    """
    on_progress("reading and tokenizing the data")
    settings = [f"data.path={data}", f"model.tokenizer_name_or_path={tokenizer}", "data.max_length=null"]
    named = [f"model={asked.model}"] if asked.model else []
    found = inspect_data_of(load_recipe(None, [*named, *settings]), show=1)
    return {
        "rows": found.num_examples,
        "tokens": found.num_tokens,
        "longest": max(row.num_tokens for row in found.rows),
        "warnings": [each.words for each in found.warnings],
    }


def isolated(function: Callable[..., Any], *arguments: Any, on_progress: OnProgress) -> Any:
    """Call a function of this module in a process without a network, and with a bound on its memory.

    Args:
        function: the function; no answer needs more.
        *arguments: its arguments.
        on_progress: its last one.
    """
    _isolate_process()
    on_progress("reading the settings")
    return function(*arguments, on_progress=on_progress)


@functools.cache  # an audit hook stays
def _isolate_process() -> None:
    sys.addaudithook(_refuse_connections)
    if sys.platform != "win32":
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        most = min(MOST_MEMORY_BYTES, psutil.virtual_memory().total)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _refuse_connections(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto", "socket.bind"):
        raise PermissionError(errno.EPERM, f"the page makes no connections, got {event} {arguments[-1]!r}")


def _settled(asked: Asked, on_progress: OnProgress) -> tuple[Request, Gpu]:
    """Return the question for a command with its GPU, once all that is known without a trace allows it."""
    gpu = _gpu_of(asked)
    devices = asked.devices or (gpu.name if gpu.name in load_gpus() else None)
    request = Request.of("estimate", _words(asked, gpu, on_progress), devices)
    request.check()
    return request, gpu


def _gpu_of(asked: Asked) -> Gpu:
    """Return the named GPU, or the cheapest with the budget."""
    if asked.devices is not None:
        return find_gpu(split_count(asked.devices)[1])
    words = asked.settings if asked.of_method else (f"recipe={asked.recipe}", *asked.settings)
    recipe = Request.of("estimate", words).recipe
    refuse_budget_beyond_all(recipe)
    gpu, _ = choose_gpu(None, recipe.budget, use_cpu=False)
    assert gpu is not None, "the form has a GPU or a budget"
    return gpu


def _words(asked: Asked, gpu: Gpu, on_progress: OnProgress) -> tuple[str, ...]:
    """Return ``recipe=NAME`` and settings; for a method, those of its fastest recipe that fits."""
    if not asked.of_method:
        return (f"recipe={asked.recipe}", *asked.settings)
    on_progress(f"choosing the fastest recipe of the method {asked.method} that fits")
    found = best_of(_methods(asked, gpu.name))
    if found.estimate is None:
        raise UserError(*found.problems)
    return found.command


def _command(name: str, request: Request, gpu: Gpu) -> str:
    return shlex.join(command_line(name, *request.words, gpu=request.devices or gpu.name))


@functools.lru_cache(maxsize=64)
def _methods(asked: Asked, gpu: str) -> Sequence[MethodEstimate]:
    """Return the method by each engine of the GPUs."""
    own = (*asked.settings, *unless_typed(asked.of_method, asked.settings))
    others = tuple(each for each in own if not each.startswith("model="))
    count = None if asked.devices is None else split_count(asked.devices)[0]
    return estimate_methods(
        asked.model or "", [find_gpu(gpu)], settings=others, count=count or 1, kept=_kept()
    )


def _engines(asked: Asked, gpu: Gpu) -> str:
    """Return the engines of a method side by side, as the command shows them; empty for a recipe or one GPU."""
    results = _methods(asked, gpu.name) if asked.of_method else []
    return html_of(methods_on_gpu(results, gpu)) if len(results) > 1 else ""


def _script(command: Sequence[str]) -> str:
    """Return the lines with which TRL's trainer trains the same recipe, see ``docs/trainers.md``."""
    name, *settings = command
    listed = "".join(f"\n    {setting!r}," for setting in settings)
    return _LINES.format(name=name.removeprefix("recipe="), settings=f"[{listed}\n]" if settings else "[]")


_LINES = """\
from datasets import load_dataset
from lowmem_ft import hf, load_recipe
from trl import SFTTrainer

recipe = load_recipe({name!r}, {settings})
rows = load_dataset("json", data_files="YOUR_DATA.jsonl", split="train").train_test_split(0.02)

model = hf.prepare_model(recipe.model.name_or_path, recipe)
args = hf.sft_config(recipe, output_dir="out")
trainer = SFTTrainer(model=model, args=args, train_dataset=rows["train"], eval_dataset=rows["test"])
hf.attach(trainer, recipe)
trainer.train()
"""
