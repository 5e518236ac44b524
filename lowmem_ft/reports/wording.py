"""How reports name what estimates hold: categories, phases, modules, verdicts."""

from __future__ import annotations

import re

from lowmem_ft.memory.category import Category, Phase
from lowmem_ft.memory.estimate import MemoryEstimate
from lowmem_ft.units import format_bytes

CATEGORY_WORDS: dict[Category, str] = {
    "parameter": "parameters",
    "optimizer_state": "optimizer state",
    "gradient": "gradients",
    "workspace": "library workspaces",
    "input": "inputs",
    "activation": "activations",
    "logits_and_loss": "logits and loss",
    "temporary": "temporaries",
}
"""Names of the categories, from what stays longest to what goes first: the order in which reports stack them."""

PHASE_WORDS: dict[Phase, str] = {
    "load": "load",
    "forward": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer step",
    "evaluation": "evaluation",
    "save": "save",
}


def module_words(module: str) -> str:
    """A module's qualified name for people: ``model.layers.3.mlp.down_proj`` is ``mlp.down_proj of layer 3``."""
    numbered = re.search(r"(?:^|\.)(\d+)(?:\.(.+))?$", module)
    if not module:
        return "outside any module"
    if numbered is None:
        return module
    return f"{numbered[2]} of layer {numbered[1]}" if numbered[2] else f"layer {numbered[1]}"


def verdict(estimate: MemoryEstimate) -> str:
    """Whether the run fits and by how much, such as ``fits on l4 with 3.10 GiB to spare``."""
    headroom, limit = estimate.headroom_bytes, estimate.budget.device_bytes
    where = f"on {estimate.gpu.name}"
    if limit is not None and limit < estimate.gpu.memory_bytes:
        where = f"in {format_bytes(limit)} of {estimate.gpu.name}"
    if not estimate.fits:
        return f"does not fit {where}: {shortfall(estimate)}"
    return f"fits {where}" if headroom is None else f"fits {where} with {format_bytes(headroom)} to spare"


def shortfall(estimate: MemoryEstimate) -> str:
    """By how much a run that does not fit exceeds its device, its host, or both."""
    headroom, host_limit = estimate.headroom_bytes, estimate.budget.host_bytes
    over = []
    if headroom is not None and headroom < 0:
        over.append(f"{format_bytes(-headroom)} over")
    if host_limit is not None and estimate.host_peak_bytes > host_limit:
        over.append(f"host {format_bytes(estimate.host_peak_bytes - host_limit)} over")
    return ", ".join(over) or "out of memory"


def is_cpu(estimate: MemoryEstimate) -> bool:
    """Whether it is for a machine without a GPU: no caching allocator, and perhaps no known limit."""
    return estimate.gpu.name.startswith("cpu")
