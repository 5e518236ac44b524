"""CPU work of a traced step, for CPU time estimates: FLOPs, bytes and operator calls of all its micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lowmem_ft.foundation.memory.step_work import StepWork
from lowmem_ft.virtual_gpu.calls.trace import Trace
from lowmem_ft.virtual_gpu.calls.work import Work


def cpu_work(trace: Trace, *, tokens: int, micro_batches: int | None) -> StepWork | None:
    """Return the work of the last traced step.

    Args:
        trace: a trace on a machine without a GPU.
        tokens: tokens of one step; 0: not known.
        micro_batches: micro-batches of a step, of which the trace may have fewer; None: as traced.

    Returns:
        The work; None if the trace has no step, or if the step has no tokens or no matrix products.
    """
    if not trace.step_ends or not tokens:
        return None
    first, last = [0, *trace.step_ends][-2:]
    traced = [bounds for bounds in trace.micro_batches if first <= bounds[0] < last]
    entries = list(_kernels(trace, first, last))
    if traced and micro_batches is not None:
        entries += list(_kernels(trace, *traced[-1])) * (micro_batches - len(traced))
    flops: Counter[str] = Counter()
    for entry in entries:
        flops[entry.dtype] += entry.flops * entry.times
    if not flops.total():
        return None
    return StepWork(
        flops=flops.total(),
        num_bytes=sum(entry.num_bytes * entry.times for entry in entries),
        num_operators=sum(entry.times for entry in entries if entry.kind == "kernel"),
        dtype=max(flops, key=flops.__getitem__),
        tokens=tokens,
    )


def _kernels(trace: Trace, first: int, last: int) -> Iterator[Work]:
    """Yield what runs on the processor: operators, and copies within its memory."""
    return (entry for entry in trace.work[first:last] if entry.kind in ("kernel", "host copy"))
