"""Facts that only an estimate of a user's script has: lines for the same table as a recipe's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.reports.estimate_words import CATEGORY_WORDS

if TYPE_CHECKING:
    from lowmem_ft.foundation.memory.category import Category
    from lowmem_ft.planning.script_runs import ScriptEstimate

_WAYS: dict[Category, str] = {
    "parameter": "load the weights in bfloat16, or train adapters (peft) on top of frozen, quantized ones",
    "gradient": "train adapters (peft), or keep the weights in bfloat16",
    "optimizer_state": "use an optimizer with 8-bit state (lowmem_ft.optimizers), or train adapters (peft)",
    "temporary": "pass foreach=False to torch's optimizer, or use smaller batches",
    "activation": "checkpoint the layers (model.gradient_checkpointing_enable()), or use smaller batches",
    "logits_and_loss": "compute the loss in chunks (lowmem_ft.techniques.loss), or use smaller batches",
}


def script_facts(found: ScriptEstimate) -> Iterator[tuple[str, str]]:
    """Yield labels and texts: where the peak is in the code, what a step takes in, how often the host waits.

    Args:
        found: the estimate.

    Yields:
        One line each.
    """
    running = found.peak
    if running.own is not None:
        yield "in your code", f"the peak is at {running.own}"
    if running.library is not None:
        yield ("" if running.own else "in the code"), f"which has called {running.library}"
    tokens = f" of {found.tokens_per_step:,} tokens, padding included" if found.tokens_per_step else ""
    kept = f"{format_bytes(found.kept_bytes)} on the device when the last one ends, gradients included"
    if not found.steps:
        kept = f"{format_bytes(found.kept_bytes)} on the device after the last backward pass"
    yield "steps seen", f"{found.steps or 'no optimizer step; a backward pass'}{tokens}; {kept}"
    waits = found.host_waits_per_step
    if waits is not None:
        often = {0: "never", 1: "once", 2: "twice"}.get(waits, f"{waits} times")
        why = ": .item(), .cpu() and synchronize make it wait for the GPU" if waits else ""
        yield "host waits", f"{often} a step{why}"


def ways_to_fit(found: Sequence[ScriptEstimate], *, is_all: bool) -> str:
    """Return advice for a script that fits nowhere: a search cannot change the user's code.

    Args:
        found: the estimates, none of which fits.
        is_all: whether all GPUs were tried.
    """
    nearest = max((each.estimate for each in found), key=lambda estimate: estimate.headroom_bytes or 0)
    sizes = nearest.by_category_at_peak
    largest = max(_WAYS, key=lambda category: sizes.get(category, 0))
    others = "" if is_all else " Other GPUs: --gpu all."
    return (
        f"How to make it fit: the largest part is {CATEGORY_WORDS[largest]}: {_WAYS[largest]}. `lowmem-ft plan "
        f"model=NAME --gpu {nearest.gpu.name}` finds settings with which a recipe fits.{others}"
    )
