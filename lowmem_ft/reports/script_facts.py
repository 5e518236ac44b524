"""What an estimate of somebody's script says beside that of a recipe: lines for the same table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lowmem_ft.units import format_bytes

if TYPE_CHECKING:
    from lowmem_ft.estimator.script import ScriptEstimate


def script_facts(found: ScriptEstimate) -> Iterator[tuple[str, str]]:
    """Labels and texts: where the peak is in the code, what a step takes in, how often the host waits.

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
    kept = f"{format_bytes(found.kept_bytes)} on the device as the last one ends, gradients included"
    if not found.steps:
        kept = f"{format_bytes(found.kept_bytes)} on the device behind the last backward pass"
    yield "steps seen", f"{found.steps or 'none by an optimizer; a pass is'}{tokens}; {kept}"
    waits = found.host_waits_per_step
    if waits is not None:
        often = {0: "never", 1: "once", 2: "twice"}.get(waits, f"{waits} times")
        yield "host waits", f"{often} a step, as for .item(), .cpu() and synchronize"
