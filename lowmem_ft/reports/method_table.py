"""Ways to fine-tune a model without a recipe: on one GPU, or on many by the price of tokens."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from lowmem_ft.catalog.gpu_spec import Gpu
from lowmem_ft.estimator.method_estimates import MethodEstimate
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.recipe.command_lines import command_line
from lowmem_ft.recipe.shipped.fine_tuning_methods import METHODS, Method
from lowmem_ft.reports.costs import cost_cells, cost_order, usd_per_million_tokens
from lowmem_ft.reports.estimate_table import format_dollars
from lowmem_ft.reports.gpu_table import VERDICT, format_gib, speed_cell, verdict_cell
from lowmem_ft.reports.text.document import Command, Document, Pairs, Table
from lowmem_ft.reports.wording import short_name, size_words, verdict_colour

_HOURLY = "$/hour: the lowest known on-demand price; `lowmem-ft gpus` names the provider and the date."
_TITLES = {"full": "full fine-tuning"}


def methods_on_gpus(results: Sequence[MethodEstimate], gpus: Mapping[str, Gpu]) -> Document:
    """Return the cheapest GPU for each method, then a line per GPU: each method's needs, speed and price.

    Args:
        results: results, of which at least one is an estimate.
        gpus: the catalogue, by name.
    """
    by_method = _by_method(results)
    names = sorted(
        dict.fromkeys(result.gpu.name for result in results),
        key=lambda name: _order([of_gpu[name] for of_gpu in by_method.values()], gpus[name]),
    )
    marks = _marks(results)
    columns = [heading for method in by_method for heading in (method.title, "tok/s", "$/1M")]
    table = Table(
        ("GPU", "GiB", "$/hour", *columns),
        _rows([gpus[name] for name in names], list(by_method.values()), marks),
        left=("GPU",),
        spare=("$/hour", "GiB", "tok/s"),
    )
    cheapest = [
        (method.title, _cheapest([of_gpu[name] for name in names], gpus))
        for method, of_gpu in by_method.items()
    ]
    rungs = ", ".join(f"{mark} {rung}" for rung, mark in marks.items())
    return Document(
        _title(results),
        Document("Where a token is cheapest:", Pairs(cheapest, style="bold", indent=0), gap=0),
        table,
        "Under each method, GiB of GPU memory that the process needs, tokens a second, and the price of a million of "
        f"them. {f'Recipes: {rungs}. ' if rungs else ''}no: does not fit; may: may not fit; ~: fits tightly; -: not "
        f"there. {_HOURLY}",
        _commands(results),
        *_notes(results),
    )


def methods_on_gpu(results: Sequence[MethodEstimate], gpu: Gpu) -> Document:
    """Return a line for each method on one GPU.

    Args:
        results: results on that GPU, of which at least one is an estimate.
        gpu: the GPU, with its price.
    """
    costs = _costs(results)
    table = Table(
        ("", "verdict", "needs", "of", "host", "tok/s", "$/1M"),
        [
            [Text(result.method.title, "bold"), *_line(result), cost]
            for result, cost in zip(results, costs, strict=True)
        ],
        left=("", "verdict"),
        wraps=VERDICT,
    )
    price = gpu.cheapest_price
    hourly = (
        f" Prices at {format_dollars(price.usd_per_hour)} an hour ({price.provider}, {price.date})."
        if price and set(costs) != {"-"}
        else ""
    )
    return Document(
        _title(results, f" on {gpu.name}"),
        table,
        f"GiB of GPU and host memory that the process needs. $/1M: tokens.{hourly}",
        _commands(results),
        *_notes(results),
    )


def _by_method(results: Sequence[MethodEstimate]) -> dict[Method, dict[str, MethodEstimate]]:
    by_method: dict[Method, dict[str, MethodEstimate]] = {}
    for result in results:
        by_method.setdefault(result.method, {})[result.gpu.name] = result
    return by_method


def _title(results: Sequence[MethodEstimate], where: str = "") -> Text:
    model = next(result.estimate.model for result in results if result.estimate is not None)
    methods = ", ".join(_TITLES.get(method.name, method.title) for method in _by_method(results))
    lengths = sorted({result.row_tokens for result in results if result.row_tokens is not None})
    rows = f"; rows of {' or '.join(f'{length:,}' for length in lengths)} tokens" if lengths else ""
    return Text.assemble((short_name(model.name), "bold"), f"{where}: {methods}\n{size_words(model, rows)}")


def _order(results: Sequence[MethodEstimate], gpu: Gpu) -> tuple[int, float, int]:
    """Return the sort key of the cheapest method that fits."""
    estimates = [result.estimate for result in results if result.estimate is not None]
    return min((cost_order(estimate, gpu) for estimate in estimates), default=(3, 0.0, gpu.memory_bytes))


def _marks(results: Sequence[MethodEstimate]) -> dict[str, str]:
    """Return a letter for each shown recipe of a method that has several."""
    rungs = dict.fromkeys(
        rung for method in _by_method(results) if len(method.rungs) > 1 for rung in _rungs(method, results)
    )
    return dict(zip(rungs, string.ascii_lowercase, strict=False))


def _rungs(method: Method, results: Sequence[MethodEstimate]) -> list[str]:
    shown = {result.rung for result in results if result.method == method and result.estimate is not None}
    return [*(rung for rung in method.rungs if rung in shown), *sorted(shown - {*method.rungs})]


def _cheapest(results: Sequence[MethodEstimate], gpus: Mapping[str, Gpu]) -> Text:
    """Return the GPU with the lowest price of a token, of those that fit; without a price, the smallest."""
    fitting = [(result, result.estimate) for result in results if result.estimate is not None and result.fits]
    if not fitting:
        may = any(result.estimate and result.estimate.verdict == "may not fit" for result in results)
        return Text("may not fit on any" if may else "fits on no GPU", "red")
    result, estimate = min(fitting, key=lambda each: cost_order(each[1], gpus[each[0].gpu.name]))
    gpu, step = gpus[result.gpu.name], estimate.step
    price, cost = gpu.cheapest_price, usd_per_million_tokens(estimate, gpu)
    words = []
    if price is not None and cost is not None:
        words.append(f"{format_dollars(cost)} per 1M tokens at {format_dollars(price.usd_per_hour)} an hour")
    if step is not None:
        words.append(f"{step.tokens_per_second:,.0f} tokens/s")
    words.append(f"{format_bytes(estimate.host_peak_bytes)} of host memory")
    if len(result.method.rungs) > 1:
        words.append(f"by {result.rung}")
    rented = "" if price is not None else " (no known price)"
    return Text.assemble((gpu.name, "bold green"), f"{rented}: {', '.join(words)}")


def _rows(
    gpus: Sequence[Gpu], by_method: Sequence[Mapping[str, MethodEstimate]], marks: Mapping[str, str]
) -> list[list[str | Text]]:
    rows: list[list[str | Text]] = [
        [gpu.name, format_gib(gpu.memory_bytes), f"{price.usd_per_hour:.2f}" if price else "-"]
        for gpu in gpus
        for price in [gpu.cheapest_price]
    ]
    for of_gpu in by_method:
        results = [of_gpu[gpu.name] for gpu in gpus]
        for row, result, cost in zip(rows, results, _costs(results), strict=True):
            row += [*_cells(result, marks), cost]
    return rows


def _cells(result: MethodEstimate, marks: Mapping[str, str]) -> tuple[str | Text, str]:
    estimate = result.estimate
    if estimate is None:
        return "-", "-"
    needs, colour = format_gib(estimate.process_peak_bytes), verdict_colour(estimate)
    needs += marks.get(result.rung, "")
    if not estimate.fits:
        return Text(needs, colour), "may" if estimate.verdict == "may not fit" else "no"
    return Text(f"~{needs}" if estimate.tight else needs, colour), speed_cell(estimate)


def _line(result: MethodEstimate) -> list[str | Text]:
    estimate = result.estimate
    if estimate is None:
        return [Text("cannot run", "red"), *("-",) * 4]
    return [
        verdict_cell(estimate),
        format_gib(estimate.process_peak_bytes),
        format_gib(estimate.gpu.memory_bytes),
        format_gib(estimate.host_peak_bytes),
        speed_cell(estimate),
    ]


def _costs(results: Sequence[MethodEstimate]) -> list[str]:
    """Return the column of the cost of a million tokens."""
    return cost_cells(
        [
            None if result.estimate is None else usd_per_million_tokens(result.estimate, result.gpu)
            for result in results
        ]
    )


def _commands(results: Sequence[MethodEstimate]) -> Document:
    """Return the commands that train each method that fits; for GPUs without bfloat16 with settings for them."""
    has_bfloat16: dict[tuple[Method, tuple[str, ...]], bool] = {}
    # Sorting is stable: methods stay as they are, their recipes come in their order.
    for result in sorted(results, key=_place):
        if result.fits:
            each = (result.method, result.command)
            has_bfloat16[each] = has_bfloat16.get(each, False) or result.gpu.has_bfloat16
    by_title: dict[str, list[Command]] = {}
    for (method, command), is_usual in has_bfloat16.items():
        is_other = not is_usual and any(has_bfloat16.values())
        title = f"{method.title}{', on GPUs without bfloat16' if is_other else ''}"
        by_title.setdefault(title, []).append(Command(*command_line("train", *command)))
    titled = [Document(*commands, title=title, gap=0) for title, commands in by_title.items()]
    intro = "To train (`estimate` in place of `train` shows it in detail):" if titled else None
    return Document(intro, *titled, gap=0)


def _place(result: MethodEstimate) -> tuple[int, int]:
    rungs = result.method.rungs
    return METHODS.index(result.method), rungs.index(result.rung) if result.rung in rungs else len(rungs)


def _notes(results: Sequence[MethodEstimate]) -> Iterator[str]:
    """Yield why something cannot be done, once for all GPUs."""
    gpus_by_reason: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.estimate is None:
            reason = (result.method.title, " ".join(result.problems))
            gpus_by_reason.setdefault(reason, []).append(result.gpu.name)
    for (title, reason), names in gpus_by_reason.items():
        is_everywhere = len(names) == len({result.gpu.name for result in results})
        where = "" if is_everywhere else f" on {', '.join(names)}"
        yield f"{title} is not estimated{where}: {reason}"
