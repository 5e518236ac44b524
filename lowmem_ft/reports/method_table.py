"""Ways to fine-tune a model without a recipe: on one GPU, or on many by the price of tokens."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.planning.estimator.method_estimates import MethodEstimate
from lowmem_ft.recipe.command_lines import launched
from lowmem_ft.recipe.gpu_count import ONE_GPU
from lowmem_ft.recipe.shipped.fine_tuning_methods import FUSED_KERNELS, METHODS, Method
from lowmem_ft.reports.costs import OwnData, cost_cells, cost_order, usd_per_million_tokens
from lowmem_ft.reports.estimate_table import format_dollars
from lowmem_ft.reports.estimate_words import duration, short_name, size_words, verdict_colour
from lowmem_ft.reports.gpu_table import (
    DATA_COLUMNS,
    HOST_BOUND_LEGEND,
    VERDICT,
    data_cells,
    format_gib,
    legend_of_data,
    most_process_bytes,
    speed_cell,
    verdict_cell,
)
from lowmem_ft.reports.text.document import Command, Document, Pairs, Table

_HOURLY = "$/hour: the lowest known on-demand price; `lowmem-ft gpus` names the provider and the date."
AS_FAST = 0.02
"""Gain of the faster of two engines below which the clock does not tell them apart."""

_TITLES = {"full": "full fine-tuning"}


def methods_on_gpus(
    results: Sequence[MethodEstimate], gpus: Mapping[str, Gpu], own_data: OwnData | None = None
) -> Document:
    """Return the cheapest GPU for each method, then a line per GPU: each method's needs, speed and price.

    Args:
        results: results, of which at least one is an estimate.
        gpus: the catalogue, by name.
        own_data: the user's data; None: columns for it are left out.
    """
    by_method = _by_method(results)
    names = sorted(
        dict.fromkeys(result.gpu.name for result in results),
        key=lambda name: _order([of_gpu[name] for of_gpu in by_method.values()], gpus[name]),
    )
    marks = _marks(results)
    further = () if own_data is None else DATA_COLUMNS
    columns = [heading for method in by_method for heading in (method.title, "tok/s", "$/1M", *further)]
    table = Table(
        ("GPU", "GiB", "$/hour", *columns),
        _rows([gpus[name] for name in names], list(by_method.values()), marks, own_data),
        left=("GPU",),
        spare=("$/hour", "GiB", "tok/s", *(() if own_data is None else (DATA_COLUMNS[0], "$/1M"))),
    )
    cheapest = [
        (method.title, _cheapest([of_gpu[name] for name in names], gpus, own_data))
        for method, of_gpu in by_method.items()
    ]
    return Document(
        _title(results),
        Document("Where a token is cheapest:", Pairs(cheapest, style="bold", indent=0), gap=0),
        table,
        "Under each method, GiB of GPU memory that the process needs, tokens a second, and the price of a million of "
        f"them. {'A letter after GiB: by which of the commands below. ' if marks else ''}no: does not fit; may: may "
        f"not fit; ~: fits tightly; -: not there. {_HOURLY}",
        *_legends(results, own_data),
        _commands(results, marks),
        *_notes(results),
    )


def methods_on_gpu(results: Sequence[MethodEstimate], gpu: Gpu, own_data: OwnData | None = None) -> Document:
    """Return a line for each method, and for each engine of several GPUs, on GPUs of one type.

    Args:
        results: results on that GPU or on as many of it, of which at least one is an estimate.
        gpu: the GPU, with its price.
        own_data: the user's data; None: columns for it are left out.
    """
    costs = _costs(results)
    further = () if own_data is None else DATA_COLUMNS
    table = Table(
        ("", "verdict", "needs", "of", "host", "tok/s", "$/1M", *further),
        [
            [Text(result.title, "bold"), *_line(result), cost, *of_data]
            for result, cost, of_data in zip(results, costs, _data_cells(results, own_data), strict=True)
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
        _title(results, f" on {_devices(results[0])}"),
        table,
        f"GiB of GPU and host memory that {_each(results[0])} needs. $/1M: tokens.{hourly}",
        *_faster(results),
        *_legends(results, own_data),
        _commands(results, {}),
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


Marks = Mapping[tuple[Method, tuple[str, ...]], str]
"""A letter for each command by which a method fits some GPU, where there are several; each method begins with a."""


def _marks(results: Sequence[MethodEstimate]) -> Marks:
    marks: dict[tuple[Method, tuple[str, ...]], str] = {}
    for method, of_gpu in _by_method(results).items():
        fitting = sorted((result for result in of_gpu.values() if result.fits), key=_place)
        commands = dict.fromkeys(result.command for result in fitting)
        if len(commands) > 1:
            marks |= dict(zip(((method, each) for each in commands), _letters(), strict=False))
    return marks


def _letters() -> Iterator[str]:
    """Yield a, b, ..., z, aa, ab, ..."""
    for number in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=number):
            yield "".join(letters)


def _legends(results: Sequence[MethodEstimate], own_data: OwnData | None) -> Iterator[str]:
    steps = [result.estimate.step for result in results if result.estimate is not None and result.fits]
    if any(step is not None and step.is_host_bound for step in steps):
        yield HOST_BOUND_LEGEND
    if own_data is not None:
        yield legend_of_data(own_data, [each.row_tokens for each in results if each.row_tokens is not None])
    if any(each.fits and _is_fused(each) for each in results):
        yield (
            f"{' '.join(f'{key}={value}' for key, value in FUSED_KERNELS.items())} needs the package liger-kernel "
            "where the run is: pip install 'lowmem-ft[liger]'."
        )


def _is_fused(result: MethodEstimate) -> bool:
    return any(f"{key}={value}" in result.command for key, value in FUSED_KERNELS.items())


def _data_cells(results: Sequence[MethodEstimate], own_data: OwnData | None) -> list[list[str]]:
    lengths = {each.row_tokens for each in results if each.row_tokens is not None}
    return data_cells(
        own_data,
        [result.estimate for result in results],
        [result.gpu for result in results],
        max(lengths, default=None),
    )


def _cheapest(results: Sequence[MethodEstimate], gpus: Mapping[str, Gpu], own_data: OwnData | None) -> Text:
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
    run = None if own_data is None else own_data.run_on(estimate, gpu, result.row_tokens)
    if run is not None:
        of_run = "" if run.usd is None else f" and {format_dollars(run.usd)}"
        words.append(f"{duration(3600 * run.hours)}{of_run} for your data")
    words.append(f"{format_bytes(estimate.host_peak_bytes)} of host memory")
    if len(result.method.rungs) > 1:
        words.append(f"by {result.rung}")
    rented = "" if price is not None else " (no known price)"
    return Text.assemble((gpu.name, "bold green"), f"{rented}: {', '.join(words)}")


def _rows(
    gpus: Sequence[Gpu],
    by_method: Sequence[Mapping[str, MethodEstimate]],
    marks: Marks,
    own_data: OwnData | None,
) -> list[list[str | Text]]:
    rows: list[list[str | Text]] = [
        [gpu.name, format_gib(gpu.memory_bytes), f"{price.usd_per_hour:.2f}" if price else "-"]
        for gpu in gpus
        for price in [gpu.cheapest_price]
    ]
    for of_gpu in by_method:
        results = [of_gpu[gpu.name] for gpu in gpus]
        of_data = _data_cells(results, own_data)
        for row, result, cost, further in zip(rows, results, _costs(results), of_data, strict=True):
            row += [*_cells(result, marks), cost, *further]
    return rows


def _cells(result: MethodEstimate, marks: Marks) -> tuple[str | Text, str]:
    estimate = result.estimate
    if estimate is None:
        return "-", "-"
    needs, colour = format_gib(most_process_bytes(estimate)), verdict_colour(estimate)
    needs += marks.get((result.method, result.command), "")
    if not estimate.fits:
        return Text(needs, colour), "may" if estimate.verdict == "may not fit" else "no"
    return Text(f"~{needs}" if estimate.tight else needs, colour), speed_cell(estimate)


def _line(result: MethodEstimate) -> list[str | Text]:
    estimate = result.estimate
    if estimate is None:
        return [Text("cannot run", "red"), *("-",) * 4]
    return [
        verdict_cell(estimate),
        format_gib(most_process_bytes(estimate)),
        format_gib(estimate.gpu.memory_bytes),
        format_gib(estimate.host_peak_bytes),
        speed_cell(estimate),
    ]


def _devices(result: MethodEstimate) -> str:
    count = result.placement.count
    return result.gpu.name if count == 1 else f"{count} x {result.gpu.name}"


def _each(result: MethodEstimate) -> str:
    return "the process" if result.placement == ONE_GPU else "each process"


def _faster(results: Sequence[MethodEstimate]) -> Iterator[str]:
    """Yield for each method that fits by two engines which is the faster one on these GPUs, and what decides it."""
    for method in dict.fromkeys(result.method for result in results):
        by_speed = sorted(
            (result for result in results if result.method == method and result.fits),
            key=_speed,
            reverse=True,
        )
        if len(by_speed) < 2 or not _speed(by_speed[1]):
            continue
        first, second = by_speed
        gain = _speed(first) / _speed(second) - 1
        words = "as fast as" if gain < AS_FAST else f"{gain:.0%} faster than"
        yield f"{method.title}: {first.placement.engine} is {words} {second.placement.engine}{_sent(by_speed)}."


def _sent(results: Sequence[MethodEstimate]) -> str:
    """Return what the processes of each engine send, and over which link."""
    sent, link = [], ""
    for result in results:
        step = None if result.estimate is None else result.estimate.step
        processes = None if result.estimate is None else result.estimate.processes
        if step is not None and processes is not None and processes.link:
            sent.append(f"{format_bytes(step.sent_bytes)} a step by {result.placement.engine}")
            link = f"{processes.link}, at {processes.link_bytes_per_second / 1e9:.3g} GB/s"
    return f". A process sends {' and '.join(sent)}, over {link}" if sent else ""


def _speed(result: MethodEstimate) -> float:
    step = None if result.estimate is None else result.estimate.step
    return 0.0 if step is None else step.tokens_per_second


def _costs(results: Sequence[MethodEstimate]) -> list[str]:
    """Return the column of the cost of a million tokens."""
    return cost_cells(
        [
            None if result.estimate is None else usd_per_million_tokens(result.estimate, result.gpu)
            for result in results
        ]
    )


def _commands(results: Sequence[MethodEstimate], marks: Marks) -> Document:
    """Return the commands that train each method that fits; for GPUs without bfloat16 with settings for them."""
    by_command: dict[tuple[Method, tuple[str, ...]], list[MethodEstimate]] = {}
    # Sorting is stable: methods stay as they are, their recipes come in their order.
    for result in sorted(results, key=_place):
        if result.fits:
            by_command.setdefault((result.method, result.command), []).append(result)
    is_usual = {each: any(result.gpu.has_bfloat16 for result in by_command[each]) for each in by_command}
    titled = []
    for each, alike in by_command.items():
        is_other = not is_usual[each] and any(is_usual.values())
        mark = marks.get(each, "")
        title = f"{alike[0].title}{mark and f' {mark}'}{', on GPUs without bfloat16' if is_other else ''}"
        titled.append(Document(Command(*train_words(alike[0])), title=title, gap=0))
    detail = "`estimate` in place of `train`"
    if results[0].placement != ONE_GPU:
        detail = f"`lowmem-ft estimate` with the same settings and --gpu {results[0].devices}"
    return Document(f"To train ({detail} shows it in detail):" if titled else None, *titled, gap=0)


def train_words(result: MethodEstimate) -> list[str]:
    """Return the words of the command that trains by a method: torchrun starts several processes."""
    return [*launched(result.recipe), *result.command]


def _place(result: MethodEstimate) -> tuple[int, int, bool]:
    """Return the sort key of a command: method, recipe, and what is for GPUs without bfloat16 last."""
    rungs = result.method.rungs
    rung = rungs.index(result.rung) if result.rung in rungs else len(rungs)
    return METHODS.index(result.method), rung, not result.gpu.has_bfloat16


def _notes(results: Sequence[MethodEstimate]) -> Iterator[str]:
    """Yield why something cannot be done, once for all GPUs."""
    gpus_by_reason: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.estimate is None:
            reason = (result.title, " ".join(result.problems))
            gpus_by_reason.setdefault(reason, []).append(result.gpu.name)
    for (title, reason), names in gpus_by_reason.items():
        is_everywhere = len(names) == len({result.gpu.name for result in results})
        where = "" if is_everywhere else f" on {', '.join(names)}"
        yield f"{title} is not estimated{where}: {reason}"
