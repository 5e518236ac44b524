"""A plan at a glance: its settings, its needs, why not less, and what more memory would buy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu, load_gpus
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.units import counted, format_bytes
from lowmem_ft.planning.planner.memory_plan import NOT_ESTIMATED, Counts, MemoryPlan, typed
from lowmem_ft.planning.planner.run_length import RunLength
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.command_lines import command_line, launched, without
from lowmem_ft.recipe.reading.keys import key_with, recipe_keys
from lowmem_ft.reports.costs import usd_per_hour
from lowmem_ft.reports.estimate_table import format_dollars, price_per_million_tokens
from lowmem_ft.reports.estimate_words import doubtful, duration, for_each, host_need, seconds_range, verdict
from lowmem_ft.reports.text.document import Command, Document, Pairs

MOST_REJECTED = 4

BINDING_WORDS = {
    "device": "device memory",
    "host": "host memory",
    "time": "nothing that more memory would speed up",
}


def plan_table(plan: MemoryPlan, recipe: Recipe) -> Document:
    """Return a plan.

    Args:
        plan: the plan to show.
        recipe: the recipe it was made for.
    """
    sections = {"Settings": _settings(plan, recipe)}
    if plan.fits:
        sections["Simpler settings that were rejected, everything else as chosen"] = _knobs(plan)
        sections["Gains from more memory"] = _purchases(plan, recipe)
        sections["Gains that a plan does not take by itself"] = _gains(plan, recipe)
        sections["Others that fit"] = _alternatives(plan, recipe)
    sections["Nearest plans that do not fit"] = _rejected(plan, recipe)
    return Document(
        _headline(plan),
        *(Document(Pairs(rows), title=title) for title, rows in sections.items()),
        _search_words(plan),
    )


def train_command(plan: MemoryPlan, command: Sequence[str]) -> list[str]:
    """Return the command that trains a plan.

    Args:
        plan: the plan to train.
        command: the recipe and settings as they were typed; those that the plan replaces are left out.

    Returns:
        The command's words.
    """
    return [*launched(plan.recipe), *without(command, plan.overrides), *plan.settings]


def another_plan(plan: MemoryPlan, asked: Sequence[str], gpu: str | None) -> Document | None:
    """Return the command that plans again where a plan does not fit: on a larger GPU, more of them, or with adapters.

    Args:
        plan: the plan that does not fit.
        asked: the recipe or model, and settings, as they were typed.
        gpu: the device as ``--gpu`` took it; None: the plan's.
    """
    on_one = plan.estimate.processes is None and not plan.estimate.is_of_cpu
    device = gpu or ("cpu" if plan.estimate.is_of_cpu else plan.estimate.gpu.name)
    if plan.smallest_gpu is not None:
        kept, processes = without(asked, ("budget", "budget.device")), plan.estimate.processes
        larger = plan.smallest_gpu if processes is None else f"{processes.num_processes}x{plan.smallest_gpu}"
        return Document("To plan for such a GPU:", Command(*command_line("plan", *kept, gpu=larger)), gap=0)
    if on_one:
        command = command_line("plan", *asked, "--max-gpus", "8", gpu=device)
        return Document("To plan for several:", Command(*command), gap=0)
    if not plan.recipe.plan.allow and plan.recipe.adapter.name == "none":
        command = command_line("plan", *asked, "plan.allow=[lora,qlora]", gpu=device)
        return Document("To plan with adapters:", Command(*command), gap=0)
    return None


def planned_for(plan: MemoryPlan) -> str:
    """Return a line on the device and the host that a plan is for, for the head of a file that holds it."""
    estimate = plan.estimate
    device, host = estimate.budget.device_bytes, estimate.budget.host_bytes
    with_device = "" if device is None else f" with {format_bytes(device)} of device memory"
    beside = "any amount" if host is None else format_bytes(host)
    return (
        f"Planned for {estimate.gpu.name}{with_device} and {beside} of host memory{for_each(estimate)}; it takes "
        f"{format_bytes(estimate.process_peak_bytes)} and {host_need(estimate)}."
    )


def _headline(plan: MemoryPlan) -> Text:
    estimate = plan.estimate
    if not plan.fits:
        return _shortfall(plan)
    lines = [f"{_without_what_was_allowed(plan)}{estimate.model.name} {verdict(estimate)}"]
    if estimate.step is None:
        lines.append(
            f"The process takes {format_bytes(estimate.process_peak_bytes)}. There is no timing model for this "
            "device: the plan is the one that changes least."
        )
    else:
        lines.append(
            f"{seconds_range(estimate.step)} a step of {_tokens(estimate)}, bound by {estimate.step.bound_by}; what "
            f"keeps it from being faster, according to the {plan.counts.estimated} estimates: "
            f"{' and '.join(BINDING_WORDS[binding] for binding in plan.binds)}"
        )
        lines.append(f"{_speed(estimate)}.")
    if plan.too_few_gpus:
        numbers = " or ".join(map(str, plan.too_few_gpus))
        lines.append(f"Nothing was found to fit on {numbers}. The GPUs share the rows of a step.")
    if plan.given_up:
        lines.append(f"It gives up what plan.allow names: {', '.join(plan.given_up)}.")
    return Text("\n".join(lines), "green")


def _without_what_was_allowed(plan: MemoryPlan) -> str:
    """Return that a plan is of full fine-tuning although adapters were allowed; empty where it is not."""
    allowed = [word for word in plan.recipe.plan.allow if word in ("lora", "qlora")]
    if not allowed or plan.recipe.adapter.name != "none":
        return ""
    return (
        f"Full fine-tuning, as it fits: plan.allow=[{','.join(allowed)}] is for where nothing else does, and "
        "adapter.name=lora plans LoRA itself.\n"
    )


def run_words(length: RunLength, estimate: MemoryEstimate) -> str:
    """Return the duration and the cost of a planned run as a sentence."""
    gpu = load_gpus().get(estimate.gpu.name)
    hourly = None if gpu is None else usd_per_hour(estimate, gpu)
    cost = "" if hourly is None else f", {format_dollars(hourly * length.seconds / 3600)}"
    return (
        f"The run: {counted(length.steps, 'step')}, {length.tokens:,} tokens, {duration(length.seconds)}{cost}, plus "
        "loading, evaluations and saving, which `lowmem-ft rehearse` counts too."
    )


def _speed(estimate: MemoryEstimate) -> str:
    """Return tokens a second of all GPUs, and the price of a million of them."""
    step, gpu = estimate.step, load_gpus().get(estimate.gpu.name)
    number = 1 if estimate.processes is None else estimate.processes.num_processes
    words = f"{number * (0.0 if step is None else step.tokens_per_second):,.0f} tokens/s"
    price = None if gpu is None else gpu.cheapest_price
    cost = price_per_million_tokens(step, price)
    if price is None or cost is None:
        return words
    each = " a GPU" if number > 1 else ""
    return (
        f"{words}, {format_dollars(cost)} per 1M tokens at {format_dollars(price.usd_per_hour)} an hour{each} "
        f"({price.provider}, {price.date})"
    )


def _tokens(estimate: MemoryEstimate) -> str:
    """Return the tokens of a step of all processes."""
    each = 0 if estimate.step is None else estimate.step.tokens
    if estimate.processes is None:
        return f"{each:,} tokens"
    return f"{estimate.processes.plan.in_all(each):,} tokens, {each:,} in each process"


def _shortfall(plan: MemoryPlan) -> Text:
    missing = [
        f"{format_bytes(num_bytes)} of {where} memory"
        for num_bytes, where in ((plan.missing_device_bytes, "device"), (plan.missing_host_bytes, "host"))
        if num_bytes
    ]
    # Fragmentation, as the allocator may leave it, cannot be given as a number of bytes.
    what = " and ".join(missing) or "room for the caching allocator"
    estimate, keep = plan.estimate, plan.recipe.plan.keep
    lines = [
        f"{estimate.model.name} {doubtful(estimate)} in {_limit_words(plan)}: the nearest plan lacks {what}, with the "
        "headroom that estimates ask for. "
        f"It takes {format_bytes(estimate.process_high_bytes)} and {host_need(estimate)}."
    ]
    if plan.smallest_gpu:
        size = format_bytes(find_gpu(plan.smallest_gpu).memory_bytes)
        lines.append(
            f"The smallest GPU of the catalogue that would do: {plan.smallest_gpu}, with {size}, and the cheapest to "
            "rent of that size."
        )
    if estimate.processes is None and not estimate.is_of_cpu:
        lines.append("--max-gpus 8 tries 2, 4 and 8 such GPUs that share the rows of a step.")
    if keep:
        lines.append(
            f"plan.keep holds {', '.join(keep)}, which a plan must not change: without it there are more choices."
        )
    if plan.recipe.plan.allow and not plan.interrupted:
        lines.append(
            f"The changes that plan.allow names do not make it fit: {', '.join(plan.recipe.plan.allow)}."
        )
    if not plan.recipe.plan.allow:
        lines.append("plan.allow=[lora,qlora] lets a plan change the mathematics in that order; see --help.")
    if plan.missing_host_bytes and _waits_on_host(plan.recipe):
        lines.append("offload.folder=FOLDER on a fast local disk replaces host memory.")
    return Text("\n".join(lines), "red")


def _waits_on_host(recipe: Recipe) -> bool:
    """Return whether something is kept on the host that files could hold."""
    on_host = key_with(recipe, "weights on host") or key_with(recipe, "state on host")
    return recipe.offload.folder is None and on_host is not None


def _limit_words(plan: MemoryPlan) -> str:
    budget = plan.estimate.budget
    device = (
        ""
        if budget.device_bytes is None
        else f"{format_bytes(budget.device_bytes)} of {plan.estimate.gpu.name}"
    )
    host = "" if budget.host_bytes is None else f"{format_bytes(budget.host_bytes)} of host memory"
    host += for_each(plan.estimate) if host else ""
    return " and ".join(part for part in (device, host) if part) or plan.estimate.gpu.name


def _settings(plan: MemoryPlan, recipe: Recipe) -> Iterator[tuple[str, str]]:
    if not plan.overrides:
        yield "the unchanged recipe", ""
    for key, value in plan.overrides.items():
        before = recipe_keys()[key].value_in(recipe)
        yield from ((setting, f"was {_plain(before)}") for setting in typed({key: value}))


def _plain(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _knobs(plan: MemoryPlan) -> Iterator[tuple[str, str]]:
    known = [knob for knob in plan.knobs if knob.reason != NOT_ESTIMATED]
    for knob in known:
        yield knob.cheaper, _rule(knob.reason)
    if known and len(known) < len(plan.knobs):
        yield "the others", NOT_ESTIMATED


def _rule(reason: str) -> str:
    """Return only the rule of a message about conflicting settings: values seen and ways out are the plan's."""
    return re.split(r", got |\.\s+(?=[A-Z])", reason)[0]


def _purchases(plan: MemoryPlan, recipe: Recipe) -> Iterator[tuple[str, str]]:
    for purchase in plan.purchases:
        yield (
            f"{format_bytes(purchase.extra_bytes)} more {purchase.of} memory",
            f"{purchase.step_seconds:.3g} s a step: {_difference(purchase.overrides, plan, recipe)}",
        )


def _gains(plan: MemoryPlan, recipe: Recipe) -> Iterator[tuple[str, str]]:
    for choice, condition in (
        (plan.fused_kernels, "needs the package liger-kernel, rounds otherwise"),
        (plan.packing, "several documents in a row, as many tokens"),
    ):
        if choice is not None:
            needs = f"{choice.step_seconds:.3g} s a step, {format_bytes(choice.device_bytes)}"
            yield _difference(choice.overrides, plan, recipe), f"{needs}; {condition}"


def _alternatives(plan: MemoryPlan, recipe: Recipe) -> Iterator[tuple[str, str]]:
    for choice in plan.alternatives:
        time = "" if choice.step_seconds is None else f"{choice.step_seconds:.3g} s, "
        memory = f"{format_bytes(choice.device_bytes)}, host {format_bytes(choice.host_bytes)}"
        yield f"{time}{memory}", _difference(choice.overrides, plan, recipe)


def _rejected(plan: MemoryPlan, recipe: Recipe) -> Iterator[tuple[str, str]]:
    others = [rejected for rejected in plan.rejected if rejected.overrides != plan.overrides]
    for rejected in others[:MOST_REJECTED]:
        yield _rule(rejected.reason), _difference(rejected.overrides, plan, recipe)


def _difference(overrides: Mapping[str, Any], plan: MemoryPlan, recipe: Recipe) -> str:
    """Return the settings in which one combination differs from the plan."""
    keys = {path: recipe_keys()[path] for path in {**plan.overrides, **overrides}}
    theirs = {path: overrides.get(path, key.value_in(recipe)) for path, key in keys.items()}
    changed = {path: value for path, value in theirs.items() if value != keys[path].value_in(plan.recipe)}
    return ", ".join(typed(changed)) or "the plan"


def _search_words(plan: MemoryPlan) -> str:
    counts: Counts = plan.counts
    words = (
        f"{counts.considered:,} combinations considered in {plan.seconds:.0f} s: {counts.estimated} estimated, "
        f"{counts.refused:,} refused by rules, "
    )
    if plan.estimate.step is None:
        words += f"{counts.beyond_seconds:,} with more or costlier changes."
    else:
        words += (
            f"{counts.beyond_bytes:,} too large at the very least, {counts.beyond_seconds:,} too slow in "
            "matrix products or host copies alone."
        )
    if plan.interrupted:
        words += " You ended the search."
    if counts.left:
        least = f", and none takes less than {plan.left_seconds:.3g} s" if plan.left_seconds else ""
        better = "may be better" if plan.fits else "may fit"
        return f"{words} {counts.left:,} were left{least}: one of them {better}."
    return (
        f"{words} No combination is left that could be better."
        if plan.fits
        else f"{words} No combination is left."
    )
