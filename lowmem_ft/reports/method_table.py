"""A model alone, by ways to fine-tune it: on one GPU, or on many by price."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowmem_ft.catalog.gpu import Gpu
from lowmem_ft.estimator.methods import Method, MethodEstimate
from lowmem_ft.reports.estimate_table import format_dollars, price_per_million_tokens
from lowmem_ft.reports.gpu_table import format_gib, hourly_order
from lowmem_ft.reports.wording import short_name, shortfall
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
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("GPU", no_wrap=True)
    for heading in ("GiB", "$/hour"):
        table.add_column(heading, justify="right", no_wrap=True)
    for method in by_method:
        table.add_column(method.title, justify="right", no_wrap=True)
        table.add_column("tok/s", justify="right", no_wrap=True)
    for name in names:
        price = gpus[name].cheapest_price
        cells = [cell for of_gpu in by_method.values() for cell in _cells(of_gpu[name])]
        table.add_row(
            name,
            format_gib(gpus[name].memory_bytes),
            f"{price.usd_per_hour:.2f}" if price else "-",
            *cells,
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
        Text(
            "\nGiB: what the card has; under each method, what the process needs of it. no: does not fit; ~: fits "
            f"tightly; -: not there. {_HOURLY}"
        ),
        *_commands(by_method),
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
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("")
    table.add_column("verdict", min_width=len("12.3 GiB tight"))
    for heading in ("needs", "of", "host", "tok/s", "$/1M"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(Text(result.method.title, "bold"), *_line(result, gpu))
    return Group(
        *_title(results, f" on {gpu.name}"),
        table,
        Text("\nGiB that the process needs of the GPU's memory, and on the host. $/1M: tokens."),
        *_commands(_by_method(results)),
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


def _cells(result: MethodEstimate) -> tuple[RenderableType, str]:
    estimate = result.estimate
    if estimate is None:
        return "-", "-"
    needs = format_gib(estimate.process_peak_bytes)
    if not estimate.fits:
        return Text(needs, "red"), "no"
    speed = "" if estimate.step is None else f"{estimate.step.tokens_per_second:,.0f}"
    return Text(f"~{needs}", "yellow") if estimate.tight else Text(needs, "green"), speed


def _line(result: MethodEstimate, gpu: Gpu) -> list[RenderableType]:
    estimate = result.estimate
    if estimate is None:
        return [Text("cannot run", "red"), *("-",) * 5]
    headroom, step = estimate.headroom_bytes, estimate.step
    verdict = Text(shortfall(estimate), "red")
    if estimate.fits and headroom is not None:
        verdict = Text(
            f"{format_bytes(headroom)} {'tight' if estimate.tight else 'free'}",
            "yellow" if estimate.tight else "green",
        )
    cost = price_per_million_tokens(step, gpu.cheapest_price) if estimate.fits else None
    return [
        verdict,
        format_gib(estimate.process_peak_bytes),
        format_gib(estimate.gpu.memory_bytes),
        format_gib(estimate.host_peak_bytes),
        f"{step.tokens_per_second:,.0f}" if step is not None and estimate.fits else "-",
        "-" if cost is None else format_dollars(cost).removeprefix("$"),
    ]


def _commands(by_method: Mapping[Method, Mapping[str, MethodEstimate]]) -> Iterator[RenderableType]:
    """What trains each, on your data; on GPUs without bfloat16, with what they take."""
    yield Text("\nTo train, or to estimate in detail: lowmem-ft train (or estimate) with")
    table = _grid()
    for method, of_gpu in by_method.items():
        runs = [result for result in of_gpu.values() if result.estimate is not None]
        for command in dict.fromkeys(result.command for result in runs):
            table.add_row(Text(method.title, "bold"), Text(" ".join(command)))
    yield table


def _notes(results: Sequence[MethodEstimate]) -> Iterator[Text]:
    """Why something cannot be done, once for all GPUs."""
    gpus_by_reason: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.estimate is None:
            reason = (result.method.title, " ".join(result.problems))
            gpus_by_reason.setdefault(reason, []).append(result.gpu.name)
    for (title, reason), names in gpus_by_reason.items():
        is_everywhere = len(names) == len({result.gpu.name for result in results})
        where = "" if is_everywhere else f" on {', '.join(names)}"
        yield Text(f"\n{title} is not estimated{where}: {reason}")


def _grid() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table
