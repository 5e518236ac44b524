"""Calls of kernels that need not be installed, measured on a virtual GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
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


def call_of_delta_rule(function, *, is_normalised=True):
    """A call of a delta rule of flash-linear-attention, ours or the package's, for :func:`measured`."""

    def call(q, k, v, g, beta, state, offsets):
        return function(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=state,
            output_final_state=state is not None,
            use_qk_l2norm_in_kernel=is_normalised,
            cu_seqlens=offsets,
        )

    return call


def assert_delta_rule_of_package(inputs, ours, of_package, *, is_normalised, has_documents):
    """Hold ours to the package's bytes and kernels."""
    ours = measured(inputs, call_of_delta_rule(ours, is_normalised=is_normalised))
    theirs = measured(inputs, call_of_delta_rule(of_package, is_normalised=is_normalised))
    assert ours.backward == theirs.backward
    if not has_documents:
        assert ours.forward == theirs.forward
        assert vars(ours) | {"flops": None} == vars(theirs) | {"flops": None}
    else:  # the package numbers the chunks in a dozen small kernels
        assert ours.forward == [one for one in theirs.forward if one in ours.forward]
        assert ours.backward_peak == pytest.approx(theirs.backward_peak, abs=512)
