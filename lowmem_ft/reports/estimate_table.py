"""One estimate at a glance: the verdict, the contents of memory at the peak and its place, time and cost."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus, split_count
from lowmem_ft.foundation.catalog.gpu_spec import Price
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.category import PHASES
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate, StepTime
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.command_lines import command_line, without
from lowmem_ft.recipe.rules.budget_limits import check_budget_of_plan
from lowmem_ft.reports.estimate_words import (
    CATEGORY_WORDS,
    HOST_PART_WORDS,
    PHASE_WORDS,
    budget_below_device,
    caution,
    context_words,
    from_to,
    host_bound_words,
    module_words,
    seconds_range,
    short_name,
    shortfall,
    size_words,
    verdict,
    verdict_colour,
)
from lowmem_ft.reports.text.bar import Bar
from lowmem_ft.reports.text.document import INDENT, Command, Document, Pairs

if TYPE_CHECKING:
    from lowmem_ft.planning.estimator.changes import Change, Changes
    from lowmem_ft.planning.estimator.fitting_shipped_recipe import ShippedRecipe

WORTH_A_WORD = 0.005
"""Share of the host's peak below which parts are left out."""


def estimate_table(
    estimate: MemoryEstimate,
    price: Price | None = None,
    further: Sequence[tuple[str, str]] = (),
    of_data: str = "",
) -> Document:
    """Return one estimate, for a rich console of any width, with colour or without.

    Args:
        estimate: the estimate to show.
        price: price of an hour of the GPU; None leaves the cost out.
        further: labels and texts of more lines, which come below the place of the peak.
        of_data: what a run over the user's data takes; empty: not asked for.

    Returns:
        A document, which ``rich.print`` prints.
    """
    peak, *others = facts(estimate, price, of_data)
    return Document(headline(estimate), _memory_bars(estimate), labelled(peak, *further, *others))


def changes_table(changes: Changes, gpu_name: str) -> Document:
    """Return the changes that would make the run fit, one a line, with new peak and price in time or fidelity.

    Args:
        changes: the changes found; if nothing fits, the table says what is missing.
        gpu_name: the GPU it would fit on.
    """
    if not changes.fitting and not changes.complete:
        return Document(f"The search was stopped before it found a change that makes it fit on {gpu_name}.")
    if not changes.fitting:
        return Document(what_is_missing(changes.all_together, gpu_name))
    rows = [
        (
            f"peak {format_bytes(change.estimate.process_peak_bytes)}",
            Text.assemble((shlex.join(change.overrides), "bold"), f"\n{change.why}"),
        )
        for change in changes.fitting
    ]
    return Document(
        Pairs(rows),
        None if changes.complete else "The search was stopped; there may be more.",
        title=f"Cheapest changes that make it fit on {gpu_name}:",
        gap=0,
    )


def shipped_table(shipped: ShippedRecipe, gpu_name: str) -> Document:
    """Return a shipped recipe that fits where the user's does not, as the command that trains it.

    Args:
        shipped: the recipe.
        gpu_name: the GPU it fits on.
    """
    peak = format_bytes(shipped.estimate.process_peak_bytes)
    trains = f", and trains {shipped.trains}" if shipped.trains else ""
    return Document(
        Command(*command_line("train", *shipped.settings)),
        title=f"A shipped recipe fits on {gpu_name}, with its own rows and steps, peak {peak}{trains}:",
    )


def way_to_a_plan(
    settings: Sequence[str], recipe: Recipe, estimate: MemoryEstimate, gpu: str | None = None
) -> Document:
    """Return the command that searches for settings with which something fits that does not.

    A budget that no plan can keep, or that is more than the device has, is left out, and the report says so.

    Args:
        settings: ``recipe=NAME`` or ``model=NAME``, and every setting that the answer used.
        recipe: what they mean.
        estimate: the answer, or the one of several that lacks the least.
        gpu: the device as ``--gpu`` took it; None: the estimate's.
    """
    if gpu is None and estimate.gpu.name in load_gpus():
        gpu = estimate.gpu.name
    elif gpu is None and estimate.is_of_cpu:
        gpu = "cpu"
    problems: tuple[str, ...] = ()
    try:
        check_budget_of_plan(recipe, None if gpu is None else split_count(gpu)[1])
    except UserError as error:
        problems, settings = error.problems, without(settings, _BUDGETS)
    command = Command(*command_line("plan", *settings, gpu=gpu))
    beyond = " without the budget" if problems else ""
    intro = f"To search for settings with which it fits{beyond}:"
    return Document(" ".join(problems), intro, command, gap=0)


_BUDGETS = ("budget", "budget.device", "budget.host")


def price_per_million_tokens(step: StepTime | None, price: Price | None) -> float | None:
    """Return US dollars per million tokens; None if the time or the price is unknown."""
    if step is None or price is None or not step.tokens_per_second:
        return None
    return price.usd_per_hour * 1e6 / (3600 * step.tokens_per_second)


def format_dollars(dollars: float) -> str:
    """Return a price with two significant digits, such as ``$0.0071``, ``$0.050`` or ``$12.40``."""
    return f"${dollars:.2f}" if dollars >= 0.1 else f"${dollars:#.2g}"


def what_is_missing(all_together: Change | None, gpu_name: str) -> Text:
    """Return by how much a run does not fit with every change at once.

    Args:
        all_together: those changes; None: there are no changes.
        gpu_name: the GPU it does not fit on.
    """
    if all_together is None:
        return Text(f"It does not fit on {gpu_name}, and no other setting would need less.")
    estimate = all_together.estimate
    return Text.assemble(
        f"No change makes it fit on {gpu_name}. All of them together still need "
        f"{format_bytes(estimate.process_peak_bytes)}, {shortfall(estimate)}: ",
        (shlex.join(all_together.overrides), "bold"),
    )


def headline(estimate: MemoryEstimate) -> Text:
    """Return the model, whether it fits, and how much of it is trained."""
    model = estimate.model
    trained = "all trained"
    if model.trainable_parameters != model.parameters:
        share = model.trainable_parameters / model.parameters
        trained = f"{model.trainable_parameters:,} trained ({share:.2%})"
    colour = verdict_colour(estimate)
    warning = caution(estimate)
    return Text.assemble(
        (short_name(model.name), "bold"),
        " ",
        (verdict(estimate), f"bold {colour}"),
        (f"\n{warning}" if warning else "", colour),
        f"\n{size_words(model, f', {trained}')}",
    )


def _memory_bars(estimate: MemoryEstimate) -> Document:
    """Return a bar for each use of memory; the whole width is all that may be used, or all that is needed."""
    (memory, others), process = _whole(estimate), estimate.process_peak_bytes
    whole, width = memory or process, max(memory, process + others, 1)
    bars = Grid(box=None, padding=(0, 1, 0, 0), show_header=False, expand=True)
    bars.add_column(no_wrap=True)
    bars.add_column(ratio=1)
    for _ in ("bytes", "share"):
        bars.add_column(justify="right", no_wrap=True)
    for words, size, colour in uses(estimate):
        bars.add_row(words, Bar(size / width, colour), format_bytes(size), f"{size / whole:.1%}")
    peaks = (
        f"allocated {format_bytes(estimate.allocated_peak_bytes)}, "
        f"reserved {format_bytes(estimate.reserved_peak_bytes)}, "
        f"process {format_bytes(estimate.process_peak_bytes)}{_range(estimate)}"
    )
    title = f"Memory of {estimate.gpu.name} at the peak"
    if memory:
        title += f", of {format_bytes(memory)}"
    if budget_below_device(estimate) is not None:
        title += " that the budget allows"
    return Document(Padding(bars, (0, 0, 0, INDENT)), Pairs([("", peaks)], indent=0), title=title, gap=0)


def _whole(estimate: MemoryEstimate) -> tuple[int, int]:
    """Return the memory available, and how much of it others hold: the device's, or a smaller budget and 0."""
    budget = budget_below_device(estimate)
    return (estimate.gpu.memory_bytes, estimate.gpu.held_by_others_bytes) if budget is None else (budget, 0)


def _range(estimate: MemoryEstimate) -> str:
    found = estimate.process_range
    return "" if found is None else f" ({from_to(found.low_bytes, found.high_bytes)})"


def uses(estimate: MemoryEstimate) -> Iterator[tuple[str, int, str]]:
    """Yield name, bytes and colour of each use of memory, in the order of the bar: tensors, then what surrounds them.

    Args:
        estimate: the estimate to show.
    """
    for category, words in CATEGORY_WORDS.items():
        if size := estimate.by_category_at_peak.get(category, 0):
            yield words, size, "cyan"
    if cached := estimate.reserved_peak_bytes - estimate.allocated_peak_bytes:
        yield "cached, not in use", cached, "blue"
    if outside := estimate.process_peak_bytes - estimate.reserved_peak_bytes:
        yield context_words(estimate), outside, "blue"
    memory, others = _whole(estimate)
    if others:
        yield "held by others", others, "magenta"
    if memory:
        free = memory - others - estimate.process_peak_bytes
        yield ("free", free, "dim") if free >= 0 else ("missing", -free, "red")


def labelled(*lines: tuple[str, str]) -> Pairs:
    """Return labels, with texts wrapped next to them; a line with an empty label continues the one above."""
    return Pairs(lines, style="bold", indent=0)


def facts(estimate: MemoryEstimate, price: Price | None, of_data: str = "") -> Iterator[tuple[str, str]]:
    """Yield labels and texts below the bars: the place of the peak, host, time, cost, and what was chosen.

    Args:
        estimate: the estimate to show.
        price: price of an hour of the GPU; None leaves the cost out.
        of_data: what a run over the user's data takes; empty: not asked for.
    """
    module = module_words(estimate.peak_module)
    yield "peak", f"in {PHASE_WORDS[estimate.peak_phase]}, {module}"
    by_phase = estimate.by_phase
    peaks = [f"{PHASE_WORDS[phase]} {format_bytes(by_phase[phase])}" for phase in PHASES if phase in by_phase]
    yield "by phase", ", ".join(peaks)
    yield from _processes(estimate)
    if estimate.balanced_peak_bytes is not None:
        yield (
            "routing",
            "the one that needs the most memory: in each layer one expert computes a row of every token; balanced, "
            f"the process takes {format_bytes(estimate.balanced_peak_bytes)}",
        )
    yield "host", _host_words(estimate)
    if parts := _host_parts(estimate):
        yield "", parts
    step = estimate.step
    if step is not None:
        has_waits = step.host_share >= 0.01 and not step.is_host_bound
        waits = f", {step.host_share:.0%} of it waits for the host" if has_waits else ""
        yield ("step", f"{seconds_range(step)}{_speed(estimate, step)}, bound by {step.bound_by}{waits}")
        if step.is_host_bound and not estimate.is_of_cpu:
            yield "", host_bound_words(step)
        if step.unlike_measured:
            yield (
                "",
                "a wide range: no run that was timed on such a GPU spends as much of a step on "
                f"{' and '.join(step.unlike_measured)}",
            )
    cost = price_per_million_tokens(step, price)
    if price is not None and cost is not None:
        yield (
            "cost",
            f"{format_dollars(cost)} per 1M tokens at {format_dollars(price.usd_per_hour)} an hour "
            f"({price.provider}, {price.date})",
        )
    if of_data:
        yield "your data", of_data
    yield from (("" if index else "chosen", text) for index, text in enumerate(estimate.choices))
    yield from (("" if index else "not modelled", text) for index, text in enumerate(estimate.not_modelled))
    if estimate.versions:
        versions = ", ".join(f"{library} {version}" for library, version in estimate.versions.items())
        yield "traced", f"in {estimate.trace_seconds:.1f} s, {versions}"


def _speed(estimate: MemoryEstimate, step: StepTime) -> str:
    if not step.tokens:  # a script's own, whose batches have no token ids
        return ""
    words = f" for {step.tokens:,} tokens: {step.tokens_per_second:,.0f} tokens/s"
    if estimate.processes is None:
        return words
    return f"{words} a process, {estimate.processes.plan.in_all(step.tokens_per_second):,.0f} in all"


def _processes(estimate: MemoryEstimate) -> Iterator[tuple[str, str]]:
    """Yield which process the numbers are of, and what the processes exchange."""
    processes, step = estimate.processes, estimate.step
    if processes is None:
        return
    machines = f" on {processes.num_machines} machines" if processes.num_machines > 1 else ""
    words = f"{processes.num_processes}{machines}, {processes.strategy}; the numbers are for one process"
    if 0 < processes.last_peak_bytes != estimate.process_peak_bytes:
        last = format_bytes(processes.last_peak_bytes)
        words += f", the first of them, which has the most rows; the last takes {last}"
    yield "processes", words
    if step is not None and step.sent_bytes:
        rate = processes.link_bytes_per_second / 1e9
        words = f"each sends {format_bytes(step.sent_bytes)} a step over {processes.link}, at {rate:.3g} GB/s"
        if processes.ideal_sent_bytes:
            words += (
                "; gathering the weights twice and scattering their gradients once would take "
                f"{format_bytes(processes.ideal_sent_bytes)}"
            )
        yield "", words


def _host_words(estimate: MemoryEstimate) -> str:
    pinned, limit = estimate.host_pinned_bytes, estimate.budget.host_bytes
    words = f"{format_bytes(estimate.host_peak_bytes)} resident at the peak"
    words += f", {format_bytes(pinned)} pinned" if pinned else ""
    words += f", of {format_bytes(limit)} allowed" if limit is not None else ""
    if estimate.processes is not None:
        together = format_bytes(estimate.machine_host_bytes)
        each, last_bytes = "for each process", estimate.processes.last_host_bytes
        if last_bytes and format_bytes(last_bytes) != format_bytes(estimate.host_peak_bytes):
            each = f"for the first process, and {format_bytes(last_bytes)} for each other"
        words += f", {each}; {together} on a machine with {estimate.processes.per_machine}"
    on_disk = estimate.disk_peak_bytes
    return words + (f"; {format_bytes(on_disk)} on disk, in offload.folder" if on_disk else "")


def _host_parts(estimate: MemoryEstimate) -> str:
    """Return the parts of the host's peak, the largest first; empty for a CPU, whose bars show them."""
    parts = {} if estimate.is_of_cpu else estimate.host_by_part_at_peak
    largest_first = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{HOST_PART_WORDS[part]} {format_bytes(num_bytes)}"
        for part, num_bytes in largest_first
        if num_bytes >= WORTH_A_WORD * estimate.host_peak_bytes
    )
