"""The range of an estimate whose program compiles code, which was estimated as it runs uncompiled.

Compiling changes what a forward and a backward pass hold, and no weights or optimizer state. Of the activations it
keeps fewer: element-wise results are computed again. Gradients it may hold twice: a compiled backward pass hands over
all of its own at its end, where they are added to those of the micro-batches before. How far is known from few real
runs (``scripts/measuring/compiled_runs.py``). CUDA graphs (``mode="reduce-overhead"``) and tuned kernels
(``max-autotune``) hold memory of their own, which is not in the range.

Seconds are at least those of what cannot be fused away: products, attention, convolutions, copies and the optimizer's
update, with no wait for the host.
"""

from __future__ import annotations

import dataclasses

from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate, StepTime

_LESS_SHARE = 0.6
_MORE_SHARE = 0.1
"""Shares of what a pass holds at the peak. The runs had at most 41% less; they were few and small, so the range is half
as wide again. Gradients apart, none had more: an allowance."""

_OF_A_PASS = ("activation", "logits_and_loss", "gradient", "temporary")
_FUSED = ("cross entropy", "lookups", "reductions", "element-wise")
"""Kinds of kernels that may become a part of others."""


def with_compiled_code(estimate: MemoryEstimate) -> MemoryEstimate:
    """Return the estimate of a program that compiles code, from that of the same program without."""
    of_a_pass = sum(estimate.by_category_at_peak.get(category, 0) for category in _OF_A_PASS)
    found, limit = estimate.process_range, estimate.budget.device_bytes
    assert found is not None
    summed = estimate.by_phase.get("backward", 0) + estimate.by_category_at_peak.get("gradient", 0)
    low = found.low_bytes - round(_LESS_SHARE * of_a_pass)
    high = found.high_bytes + round(_MORE_SHARE * of_a_pass)
    high += max(0, summed - estimate.allocated_peak_bytes)
    host_limit = estimate.budget.host_bytes
    is_host_enough = host_limit is None or estimate.host_peak_bytes <= host_limit
    return dataclasses.replace(
        estimate,
        process_range=dataclasses.replace(found, low_bytes=max(0, low), high_bytes=high),
        fits=estimate.fits and (limit is None or high <= limit),
        fits_at_low_end=estimate.fits_at_low_end or (is_host_enough and (limit is None or low <= limit)),
        step=estimate.step and _with_fused_kernels(estimate.step),
    )


def _with_fused_kernels(step: StepTime) -> StepTime:
    fused = sum(step.by_kind.get(kind, 0.0) for kind in _FUSED)
    return dataclasses.replace(step, least_share=max(0.0, 1 - step.host_share - fused))
