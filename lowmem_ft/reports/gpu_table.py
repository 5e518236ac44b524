"""One recipe on many GPUs: those that hold it, their speed and their price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.units import GIB, format_bytes
from lowmem_ft.planning.estimator.gpu_counts import SeveralGpus
from lowmem_ft.reports.costs import OwnData, cost_cells, cost_order, usd_per_hour, usd_per_million_tokens
from lowmem_ft.reports.estimate_words import short_name, shortfall, verdict_colour
from lowmem_ft.reports.text.document import Document, Table

LEGEND = (
    "GiB of GPU and host memory that the process needs. $/hour: the lowest known on-demand price; `lowmem-ft gpus` "
    "names the provider and the date. $/1M: tokens."
)

HOST_BOUND_MARK = "h"
HOST_BOUND_LEGEND = (
    f"{HOST_BOUND_MARK}: the GPU waits for its host for a fifth of the time or more. One usual host is assumed for all "
    "GPUs; a faster or a slower one changes these numbers most."
)

DATA_COLUMNS = ("hours", "$")
"""Columns for a run over the user's data."""

VERDICT = ("verdict", len("12.3 GiB tight"))
"""The column that may wrap onto a second line, for instance if device and host lack memory, and its least width."""


def gpu_table(
    estimates: Sequence[MemoryEstimate],
    gpus: Mapping[str, Gpu],
    cannot_run: Mapping[str, str],
    own_data: OwnData | None = None,
    row_tokens: int | None = None,
) -> Document:
    """Return a line for each GPU, the cheapest tokens first; then those it does not fit on, and those without a price.

    Args:
        estimates: at least one estimate, all of the same recipe.
        gpus: the catalogue, by name.
        cannot_run: the error, by the name of each GPU whose hardware cannot run the recipe; the table shows its rule.
        own_data: the user's data; None: columns for it are left out.
        row_tokens: the most tokens of a row of it.
    """
    table = _table(by_cost(estimates, gpus), gpus, own_data, row_tokens)
    model = estimates[0].model
    num_fitting = sum(estimate.fits for estimate in estimates)
    num_tight = sum(estimate.tight for estimate in estimates)
    num_open = sum(estimate.verdict == "may not fit" for estimate in estimates)
    title = f" fits on {num_fitting} of {len(estimates) + len(cannot_run)} GPUs"
    title += f", on {num_tight} of them tightly" if num_tight else ""
    title += f", and may not fit on {num_open} more" if num_open else ""
    return Document(
        Document(
            Text.assemble((short_name(model.name), "bold"), title, f"\n{model.parameters:,} parameters"),
            *_in_common(estimates),
            gap=0,
        ),
        table,
        *_refusals(cannot_run),
        LEGEND,
        HOST_BOUND_LEGEND if any(map(_is_marked, estimates)) else None,
        None if own_data is None else legend_of_data(own_data, [] if row_tokens is None else [row_tokens]),
    )


def several_table(
    several: SeveralGpus,
    gpus: Mapping[str, Gpu],
    own_data: OwnData | None = None,
    row_tokens: int | None = None,
) -> Document:
    """Return a line for each GPU type that holds its share of a recipe as one of several: the fewest, cheapest first.

    Args:
        several: the numbers tried.
        gpus: the catalogue, by name.
        own_data: as for :func:`gpu_table`.
        row_tokens: likewise.
    """
    if several.problems:
        return Document(f"Several GPUs cannot share it: {several.problems[0]}")
    *fewer, most = map(str, several.tried)
    numbers = f"{', '.join(fewer)} or {most}" if fewer else most
    if not several.estimates:
        return Document(f"The others do not hold it, even {numbers} of one type that share it by fsdp2.")
    return Document(
        f"The fewest of {numbers} GPUs of each other type that hold it, sharded by fsdp2:",
        _table(by_cost(several.estimates, gpus), gpus, own_data, row_tokens),
        "GiB of each GPU; $/hour and tok/s of all. N GPUs take N times the rows a step: divide "
        "training.gradient_accumulation_steps by N to keep the same step. `--gpu 8xNAME` shows such an estimate "
        "in full.",
    )


def by_cost(estimates: Sequence[MemoryEstimate], gpus: Mapping[str, Gpu]) -> list[MemoryEstimate]:
    """Return estimates by the price of a token; see :func:`lowmem_ft.reports.costs.cost_order`.

    Args:
        estimates: estimates in any order.
        gpus: the catalogue, by name.

    Returns:
        The estimates in order.
    """
    return sorted(estimates, key=lambda estimate: cost_order(estimate, gpus[estimate.gpu.name]))


def format_gib(num_bytes: int) -> str:
    """Return a size in GiB for a column, with three digits."""
    gib = num_bytes / GIB
    return f"{gib:.2f}" if gib < 9.995 else f"{gib:.1f}" if gib < 99.95 else f"{gib:.0f}"


def _table(
    estimates: Sequence[MemoryEstimate],
    gpus: Mapping[str, Gpu],
    own_data: OwnData | None,
    row_tokens: int | None,
) -> Table:
    of_gpus = [gpus[estimate.gpu.name] for estimate in estimates]
    costs = cost_cells(list(map(usd_per_million_tokens, estimates, of_gpus)))
    rows = [
        [*_row(estimate, gpu), cost, *of_data]
        for estimate, gpu, cost, of_data in zip(
            estimates, of_gpus, costs, data_cells(own_data, estimates, of_gpus, row_tokens), strict=True
        )
    ]
    further = () if own_data is None else DATA_COLUMNS
    return Table(
        ("GPU", "verdict", "needs", "of", "host", "tok/s", "$/hour", "$/1M", *further),
        rows,
        left=("GPU", "verdict"),
        wraps=VERDICT,
        spare=("$/1M", "tok/s", "of", "host") if own_data is None else ("of", "host", "tok/s", "$/hour"),
    )


def _row(estimate: MemoryEstimate, gpu: Gpu) -> list[str | Text]:
    processes = estimate.processes
    hourly = usd_per_hour(estimate, gpu)
    number = estimate.plan.num_processes
    peak = estimate.process_peak_bytes
    return [
        estimate.gpu.name if number == 1 else f"{number}x{estimate.gpu.name}",
        verdict_cell(estimate),
        format_gib(peak if processes is None else max(peak, processes.last_peak_bytes or 0)),
        format_gib(estimate.gpu.memory_bytes),
        format_gib(estimate.host_peak_bytes),
        speed_cell(estimate),
        "-" if hourly is None else f"{hourly:.2f}",
    ]


def speed_cell(estimate: MemoryEstimate) -> str:
    """Return tokens a second of all its GPUs; ``-`` if it does not fit, or has no tokens, as with some scripts."""
    step = estimate.step
    if step is None or not step.tokens or not estimate.fits:
        return "-"
    return f"{estimate.plan.in_all(step.tokens_per_second):,.0f}{HOST_BOUND_MARK * step.is_host_bound}"


def _is_marked(estimate: MemoryEstimate) -> bool:
    return speed_cell(estimate).endswith(HOST_BOUND_MARK)


def data_cells(
    own_data: OwnData | None,
    estimates: Sequence[MemoryEstimate | None],
    gpus: Sequence[Gpu],
    row_tokens: int | None,
) -> list[list[str]]:
    """Return the cells of :data:`DATA_COLUMNS` for each line; empty lists without data.

    Args:
        own_data: the user's data.
        estimates: the estimate of each line; None: it has none.
        gpus: the GPU of each line.
        row_tokens: the most tokens of a row.
    """
    if own_data is None:
        return [[] for _ in estimates]
    runs = [
        None if estimate is None else own_data.run_on(estimate, gpu, row_tokens)
        for estimate, gpu in zip(estimates, gpus, strict=True)
    ]
    hours = cost_cells([None if run is None else run.hours for run in runs])
    dollars = cost_cells([None if run is None else run.usd for run in runs])
    return [list(pair) for pair in zip(hours, dollars, strict=True)]


def legend_of_data(own_data: OwnData, row_tokens: Sequence[int]) -> str:
    """Return what the columns of :data:`DATA_COLUMNS` are of."""
    return f"{' and '.join(DATA_COLUMNS)}: of {own_data.in_words(row_tokens)}."


def verdict_cell(estimate: MemoryEstimate) -> Text:
    """Return whether a run fits, and by how much, in few words."""
    headroom, words = estimate.headroom_bytes, estimate.verdict
    if estimate.fits:
        left = "tight" if estimate.tight else "free"
        words = "fits" if headroom is None else f"{format_bytes(headroom)} {left}"
    else:
        words = f"may not fit, {shortfall(estimate)}" if words == "may not fit" else shortfall(estimate)
    return Text(words, verdict_colour(estimate))


def _refusals(cannot_run: Mapping[str, str]) -> list[str]:
    """Return a line for each rule that excludes GPUs; an error names the rule before what it got."""
    gpus_by_rule: dict[str, list[str]] = {}
    for gpu, reason in cannot_run.items():
        gpus_by_rule.setdefault(reason.split(", got ")[0].rstrip("."), []).append(gpu)
    return [f"Cannot run it: {', '.join(gpus)}. {rule}." for rule, gpus in gpus_by_rule.items()]


def _in_common(estimates: Sequence[MemoryEstimate]) -> list[str]:
    """Return what was chosen for all GPUs alike."""
    return [
        choice for choice in estimates[0].choices if all(choice in estimate.choices for estimate in estimates)
    ]
