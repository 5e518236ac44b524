"""Words of reports for what estimates hold: categories, phases, modules, verdicts."""

from __future__ import annotations

import re
from pathlib import Path

from lowmem_ft.foundation.catalog.clock_rates import MEASURED_HOST_RANGE
from lowmem_ft.foundation.memory.category import Category, Phase
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate, ModelSize, StepTime
from lowmem_ft.foundation.memory.uncertainty import TIGHT_SHARE, is_tight
from lowmem_ft.foundation.units import format_bytes

CATEGORY_WORDS: dict[Category, str] = {
    "parameter": "parameters",
    "optimizer_state": "optimizer state",
    "gradient": "gradients",
    "workspace": "library workspaces",
    "communication": "gathered, buffers",
    "input": "inputs",
    "activation": "activations",
    "logits_and_loss": "logits and loss",
    "temporary": "temporaries",
}
"""Names of the categories, from the longest-lived to the shortest-lived: the order in which reports stack them."""

PHASE_WORDS: dict[Phase, str] = {
    "load": "load",
    "generate": "generation",
    "score": "scoring",
    "forward": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer step",
    "evaluation": "evaluation",
    "save": "save",
}


def size_words(model: ModelSize, further: str) -> str:
    """Return a line with the number of parameters, and another about those that no text passes through, if any."""
    line = f"{model.parameters:,} parameters{further}"
    if not model.other_parameters:
        return line
    return f"{line}\n{model.other_parameters:,} more, for images or sound, stay on the disk"


def short_name(model: str) -> str:
    """Return a model's name for one line: the last two parts of a local path."""
    path = Path(model)
    return model if len(path.parts) <= 2 else str(Path(*path.parts[-2:]))


def context_words(estimate: MemoryEstimate) -> str:
    """Return what a GPU's process holds outside the allocator: context and libraries, and state that is paged."""
    if estimate.paged_peak_bytes:
        return "context, paged state"
    return "context, estimated" if estimate.gpu.context_is_estimate else "context, libraries"


def module_words(module: str) -> str:
    """Return a module's name for people: ``model.layers.3.mlp.down_proj`` is ``mlp.down_proj of layer 3``."""
    numbered = re.search(r"(?:^|\.)(\d+)(?:\.(.+))?$", module)
    if not module:
        return "outside any module"
    if numbered is None:
        return module
    return f"{numbered[2]} of layer {numbered[1]}" if numbered[2] else f"layer {numbered[1]}"


HOST_PART_WORDS = {
    **CATEGORY_WORDS,
    "gradient": "pending gradients",
    "process": "the process itself",
    "heap": "freed and kept by the heap",
    "loading": "weights being read",
    "saving": "a file being written",
}
"""Names of the parts of the host memory of a run on a GPU."""


def verdict(estimate: MemoryEstimate) -> str:
    """Return whether the run fits, by how much, and what it needs in addition to the device.

    Example: ``fits on l4 with 3.10 GiB to spare, and needs 4.60 GiB of host memory``.
    """
    headroom, limit = estimate.headroom_bytes, budget_below_device(estimate)
    where = f"on {estimate.devices}"
    if limit is not None:
        where = f"in {format_bytes(limit)} of {estimate.devices}"
    if not estimate.fits:
        return f"{estimate.verdict} {where}: {shortfall(estimate)}{_beside_others(estimate)}"
    if estimate.is_of_cpu and headroom is None and estimate.budget.host_bytes is None:  # nothing to fit in
        return f"needs {format_bytes(estimate.process_peak_bytes)} {where}"
    how = f"fits {'tightly ' if estimate.tight else ''}{where}"
    if headroom is not None:
        how += f" with {format_bytes(headroom)} to spare{_beside_others(estimate)}"
    return how if estimate.is_of_cpu else f"{how}, and needs {host_need(estimate)}"


def doubtful(estimate: MemoryEstimate) -> str:
    """Return the verdict on an estimate that is not a plan: it fits too tightly, may not fit, or does not fit."""
    return "fits too tightly" if estimate.fits else estimate.verdict


def verdict_colour(estimate: MemoryEstimate) -> str:
    """Return green, yellow if it fits tightly or may not fit, or red."""
    if estimate.verdict == "does not fit":
        return "red"
    return "green" if estimate.fits and not estimate.tight else "yellow"


def budget_below_device(estimate: MemoryEstimate) -> int | None:
    """Return the budget that decides, in bytes; None if the device's own memory does."""
    limit = estimate.budget.device_bytes
    free = estimate.gpu.memory_bytes - estimate.gpu.held_by_others_bytes
    return limit if limit is not None and limit < free else None


def host_need(estimate: MemoryEstimate) -> str:
    """Return what a run needs in addition to the device, such as ``65.3 GiB of host memory``."""
    need = f"{format_bytes(estimate.host_peak_bytes)} of host memory"
    return (
        f"{need} and {format_bytes(estimate.disk_peak_bytes)} of disk" if estimate.disk_peak_bytes else need
    )


def for_each(estimate: MemoryEstimate) -> str:
    """Return the words for a process's share of the host; empty if there is one process."""
    return "" if estimate.processes is None else " for each process"


def caution(estimate: MemoryEstimate) -> str:
    """Return why a verdict is tight or open, and what to do; empty if it is neither."""
    found = estimate.process_range
    if estimate.verdict == "may not fit" and found is not None:
        ends = from_to(found.low_bytes, found.high_bytes)
        return (
            f"The limit is within the estimate's range, {ends}. It may run out of memory: try a few steps before a "
            "long run."
        )
    if not estimate.tight:
        return ""
    budget = estimate.budget
    left = [
        f"{1 - needed / limit:.1%} of {what}"
        for what, needed, limit in (
            ("the device's memory", estimate.process_peak_bytes, budget.device_bytes),
            ("budget.host", estimate.host_peak_bytes, budget.host_bytes),
        )
        if is_tight(needed, limit) and limit is not None
    ]
    return (
        f"Tight: {' and '.join(left)} is left, and estimates have been off by up to {TIGHT_SHARE:.0%}. It may run out "
        "of memory: try a few steps before a long run."
    )


def from_to(low_bytes: int, high_bytes: int) -> str:
    """Return two sizes, with one unit if they share it: ``18.1 to 18.7 GiB``."""
    low, high = format_bytes(low_bytes), format_bytes(high_bytes)
    (number, unit), same_unit = low.split(), low.split()[1] == high.split()[1]
    return f"{number if same_unit else f'{number} {unit}'} to {high}"


def seconds_range(step: StepTime) -> str:
    """Return the seconds of a step with their range: ``5.24 s (4.6 to 6)``; without one if it is not known."""
    ends = f" ({step.low_seconds:.2g} to {step.high_seconds:.2g})" if step.seconds_share else ""
    return f"{step.seconds:.3g} s{ends}"


def duration(seconds: float) -> str:
    """Return a time for people: ``42 s``, ``12 min``, ``3.2 h``."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.3g} h"


def host_bound_words(step: StepTime) -> str:
    """Return that the host decides a step's seconds, as a sentence."""
    waits = f"the GPU waits for its host {step.host_share:.0%} of the time"
    if step.host_range == MEASURED_HOST_RANGE:
        return f"{waits}, whose pace was measured here"
    return f"{waits}: a usual host is assumed, and the range has the fastest and the slowest known"


def _beside_others(estimate: MemoryEstimate) -> str:
    others = estimate.gpu.held_by_others_bytes
    return f" in addition to {format_bytes(others)} that others hold" if others else ""


def shortfall(estimate: MemoryEstimate) -> str:
    """Return by how much a run that does not fit, or may not, exceeds its device, its host, or both."""
    headroom, host_limit = estimate.headroom_bytes, estimate.budget.host_bytes
    over = []
    if headroom is not None and headroom < 0:
        over.append(f"{format_bytes(-headroom)} over")
    elif (
        estimate.budget.device_bytes is not None
        and estimate.process_high_bytes > estimate.budget.device_bytes
    ):
        over.append(f"up to {format_bytes(estimate.process_high_bytes - estimate.budget.device_bytes)} over")
    if host_limit is not None and estimate.host_peak_bytes > host_limit:
        over.append(f"host {format_bytes(estimate.host_peak_bytes - host_limit)} over{for_each(estimate)}")
    return ", ".join(over) or "out of memory"
