"""Calls of kernels that need not be installed, measured on a virtual GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowmem_ft.virtual_gpu.gpu import VirtualGPU

TIMING_BUFFER = 256 * 2**20
"""What autotuners write between two timings, once a kernel."""


@dataclass
class Measured:
    """Bytes above those of the inputs, and kernels by name and bytes, of a forward and a backward pass.

    Names are without the underscore that some packages give theirs. ``kept`` is what forward leaves, the results
    included; ``given`` is what backward leaves above the inputs.
    """

    forward_peak: int
    kept: int
    backward_peak: int
    given: int
    forward: list
    backward: list
    flops: list


def measured(inputs, call, gpu_name="a100-80gb"):
    """Run a function of ``inputs()`` forward and backward on a virtual GPU of its own."""
    with VirtualGPU(gpu_name) as gpu:
        return _on(gpu, inputs(), call)


def _on(gpu, given, call):
    timeline, work = gpu.recorder.timeline, gpu.work.entries
    start, done = len(timeline.events), len(work)
    results = call(*given)
    results = [one for one in (results if isinstance(results, tuple) else (results,)) if one is not None]
    after_forward, forward = len(timeline.events), work[done:]
    gradients = [torch.ones_like(one) for one in results]
    before_backward, done = len(timeline.events), len(work)
    torch.autograd.backward(results, gradients)
    backward = work[done:]
    live = list(_live_bytes(timeline))
    inputs = live[start - 1]
    return Measured(
        forward_peak=max(live[start:after_forward]) - inputs,
        kept=live[after_forward - 1] - inputs,
        backward_peak=max(live[before_backward:]) - inputs,
        given=live[-1] - inputs,
        forward=[(one.name.lstrip("_"), one.num_bytes) for one in forward if one.kind == "kernel"],
        backward=[(one.name.lstrip("_"), one.num_bytes) for one in backward if one.kind == "kernel"],
        flops=[(one.name, one.flops) for one in (*forward, *backward) if one.flops],
    )


def _live_bytes(timeline):
    live = 0
    for kind, index in timeline.events:
        size = timeline.allocations[index].size_bytes
        if size != TIMING_BUFFER:
            live += size if kind == "malloc" else -size
        yield live
