"""A model alone, by ways to fine-tune it: on one GPU, or on many by price."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from lowmem_ft.catalog.gpu import Gpu
from lowmem_ft.estimator.methods import Method, MethodEstimate
from lowmem_ft.reports.estimate_table import format_dollars, price_per_million_tokens
from lowmem_ft.reports.filling import shell_lines
from lowmem_ft.reports.gpu_table import VERDICT, format_gib, hourly_order, verdict_cell
from lowmem_ft.reports.prose import Prose
from lowmem_ft.reports.uncut_table import UncutTable
from lowmem_ft.reports.wording import short_name, verdict_colour
from lowmem_ft.units import format_bytes

_HOURLY = "$/hour: the lowest on-demand price known; `lowmem-ft gpus` says whose, and of what date."


def methods_on_gpus(results: Sequence[MethodEstimate], gpus: Mapping[str, Gpu]) -> RenderableType:
    """What fits first by price, then a line for each GPU: what each method needs there, and how fast it is.

    Args:
        results: at least one that is an estimate.
        gpus: the catalogue, by name.

    Returns:
        Something that ``rich.print`` prints.
    """
    by_method = _by_method(results)
    names = sorted(dict.fromkeys(result.gpu.name for result in results), key=lambda n: hourly_order(gpus[n]))
    methods = [heading for method in by_method for heading in (method.title, "tok/s")]
    table = UncutTable(
        ("GPU", "GiB", "$/hour", *methods),
        [_row(gpus[name], [of_gpu[name] for of_gpu in by_method.values()]) for name in names],
        left=("GPU",),
        spare=("$/hour", "GiB"),
    )
    cheapest = _grid()
    for method, of_gpu in by_method.items():
        cheapest.add_row(Text(method.title, "bold"), _first_fit([of_gpu[name] for name in names], gpus))
    return Group(
        *_title(results),
        Text("What fits first, by price:"),
        cheapest,
        "",
        table,
        Prose(
            "\nGiB: what the card has; under each method, what the process needs of it. no: does not fit; may: may "
            f"not fit; ~: fits tightly; -: not there. {_HOURLY}"
        ),
        _Commands(results),
        *_notes(results),
    )


def methods_on_gpu(results: Sequence[MethodEstimate], gpu: Gpu) -> RenderableType:
    """A line for each method on one GPU.

    Args:
        results: of that GPU, at least one that is an estimate.
        gpu: with its price.

    Returns:
        Something that ``rich.print`` prints.
    """
    table = UncutTable(
        ("", "verdict", "needs", "of", "host", "tok/s", "$/1M"),
        [[Text(result.method.title, "bold"), *_line(result, gpu)] for result in results],
        left=("", "verdict"),
        wraps=VERDICT,
    )
    return Group(
        *_title(results, f" on {gpu.name}"),
        table,
        Prose("\nGiB that the process needs of the GPU's memory, and on the host. $/1M: tokens."),
        _Commands(results),
        *_notes(results),
    )


def _by_method(results: Sequence[MethodEstimate]) -> dict[Method, dict[str, MethodEstimate]]:
    by_method: dict[Method, dict[str, MethodEstimate]] = {}
    for result in results:
        by_method.setdefault(result.method, {})[result.gpu.name] = result
    return by_method


def _title(results: Sequence[MethodEstimate], where: str = "") -> Iterator[RenderableType]:
    model = next(result.estimate.model for result in results if result.estimate is not None)
    yield Text.assemble((short_name(model.name), "bold"), f"{where}: full fine-tuning, LoRA, QLoRA")
    yield Text(f"{model.parameters:,} parameters; rows of 2048 tokens, or as many as the model takes\n")


def _first_fit(results: Sequence[MethodEstimate], gpus: Mapping[str, Gpu]) -> Text:
    """The GPU with the cheapest hour that does it, and what else it takes."""
    for result in results:
        estimate = result.estimate
        if estimate is None or not estimate.fits:
            continue
        price = gpus[result.gpu.name].cheapest_price
        cost = price_per_million_tokens(estimate.step, price)
        hourly = f" at {format_dollars(price.usd_per_hour)} an hour" if price else ""
        tokens = f", {format_dollars(cost)} per 1M tokens" if cost is not None else ""
        host = f"{format_bytes(estimate.host_peak_bytes)} of host memory"
        return Text.assemble((result.gpu.name, "bold green"), f"{hourly}{tokens}, beside {host}")
    return Text("fits on none", "red")


def _row(gpu: Gpu, results: Sequence[MethodEstimate]) -> list[str | Text]:
    price = gpu.cheapest_price
    hourly = f"{price.usd_per_hour:.2f}" if price else "-"
    return [
        gpu.name,
        format_gib(gpu.memory_bytes),
        hourly,
        *(cell for result in results for cell in _cells(result)),
    ]


def _cells(result: MethodEstimate) -> tuple[str | Text, str]:
    estimate = result.estimate
    if estimate is None:
        return "-", "-"
    needs, colour = format_gib(estimate.process_peak_bytes), verdict_colour(estimate)
    if not estimate.fits:
        return Text(needs, colour), "may" if estimate.verdict == "may not fit" else "no"
    speed = "" if estimate.step is None else f"{estimate.step.tokens_per_second:,.0f}"
    return Text(f"~{needs}" if estimate.tight else needs, colour), speed


def _line(result: MethodEstimate, gpu: Gpu) -> list[str | Text]:
    estimate = result.estimate
    if estimate is None:
        return [Text("cannot run", "red"), *("-",) * 5]
    step = estimate.step
    cost = price_per_million_tokens(step, gpu.cheapest_price) if estimate.fits else None
    return [
        verdict_cell(estimate),
        format_gib(estimate.process_peak_bytes),
        format_gib(estimate.gpu.memory_bytes),
        format_gib(estimate.host_peak_bytes),
        f"{step.tokens_per_second:,.0f}" if step is not None and estimate.fits else "-",
        "-" if cost is None else format_dollars(cost).removeprefix("$"),
    ]


class _Commands:
    """What trains each method, on the data of its recipe; on GPUs without bfloat16, with what they take."""

    def __init__(self, results: Sequence[MethodEstimate]) -> None:
        self._has_bfloat16: dict[tuple[str, tuple[str, ...]], bool] = {}
        for result in results:
            if result.estimate is not None:
                each = (result.method.title, result.command)
                self._has_bfloat16[each] = self._has_bfloat16.get(each, False) or result.gpu.has_bfloat16

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("\nTo train (`estimate` in place of `train` shows it in detail):")
        for (title, command), has_bfloat16 in self._has_bfloat16.items():
            is_other = not has_bfloat16 and any(self._has_bfloat16.values())
            yield Text(f"{title}{', on cards without bfloat16' if is_other else ''}", "bold")
            lines = shell_lines(["lowmem-ft", "train", *command], options.max_width)
            yield Text("\n".join(lines), overflow="fold")


def _notes(results: Sequence[MethodEstimate]) -> Iterator[Prose]:
    """Why something cannot be done, once for all GPUs."""
    gpus_by_reason: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.estimate is None:
            reason = (result.method.title, " ".join(result.problems))
            gpus_by_reason.setdefault(reason, []).append(result.gpu.name)
    for (title, reason), names in gpus_by_reason.items():
        is_everywhere = len(names) == len({result.gpu.name for result in results})
        where = "" if is_everywhere else f" on {', '.join(names)}"
        yield Prose(f"\n{title} is not estimated{where}: {reason}")


def _grid() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table
