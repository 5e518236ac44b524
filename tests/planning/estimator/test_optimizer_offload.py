"""State on the host in an estimate: its bytes move from the device to pinned memory, and copies hide behind work."""

from __future__ import annotations

import dataclasses
import json

import pytest
from measuring.comparison import compare, estimated_peaks
from measuring.real_run import run_for_real

from lowmem_ft.foundation.host.pinned_memory import PAGE_BYTES
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.estimator.traces import tracing
from lowmem_ft.planning.estimator.traces.tracing import trace_recipe
from lowmem_ft.recipe import load_recipe
from lowmem_ft.techniques.offload.optimizer_offload import NUM_SLOTS
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.replay.timing.clock import Clock

FORMATS = ("model.dtype=bfloat16", "optimizer.state=8bit", "optimizer.master=split24")
BYTES_A_PARAMETER = 1 + 2 * (1 + 4 / 256)
HOST = "offload.optimizer=host"


@pytest.fixture
def recipe_of(tmp_path, recipes_folder):
    """The recipe `tiny` with wider layers, and as many as are asked for."""

    def load(*overrides, layers=3):
        config = json.loads((recipes_folder / "tiny" / "config.json").read_text())
        config |= {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": layers}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return load_recipe("tiny", [f"model={tmp_path}", "model.weights=random", *FORMATS, *overrides])

    return load


@pytest.fixture
def recipes_folder(request):
    return request.config.rootpath / "recipes"


@pytest.mark.parametrize(
    "settings", [(HOST,), ("optimizer.state={exp_avg: bf16, exp_avg_sq: fp32}",)], ids=["host", "mixed state"]
)
def test_a_cpu_takes_what_was_estimated(recipe_of, settings):
    recipe = recipe_of(*settings)
    measured = dataclasses.asdict(run_for_real(recipe))
    comparisons = compare("host", measured, estimated_peaks(estimate_memory(recipe, "cpu")))
    assert comparisons
    assert [comparison for comparison in comparisons if abs(comparison.error) > 0.005] == []


def test_state_leaves_the_device_but_for_three_chunks(recipe_of):
    device, host = (estimate_memory(recipe_of(*where), "a100-80gb") for where in ((), (HOST,)))
    state = device.model.parameters * BYTES_A_PARAMETER
    assert device.by_category_at_peak["optimizer_state"] == pytest.approx(state, rel=0.05)
    assert host.by_category_at_peak["optimizer_state"] == 0
    batches = device.host_pinned_bytes
    assert 0 < batches <= 4 * PAGE_BYTES
    num_tensors = 5 * 30  # of some 30 parameters, each in pages of its own
    assert state <= host.host_pinned_bytes - batches <= state + num_tensors * PAGE_BYTES
    assert host.host_peak_bytes - device.host_peak_bytes == host.host_pinned_bytes - batches
    slots = [
        allocation.size_bytes
        for allocation in host.timeline.allocations
        if allocation.phase == "load" and allocation.category == "temporary" and allocation.place == "device"
    ]
    assert slots.count(max(slots)) >= NUM_SLOTS


def test_a_trace_of_few_layers_stands_for_many(recipe_of):
    recipe = recipe_of(HOST, layers=9)
    extended, whole = (
        trace_recipe(recipe, lambda: VirtualGPU("a100-80gb"), extend=extend).trace for extend in (True, False)
    )
    assert len(extended.work) == len(whole.work)
    assert [a.size_bytes for a in extended.timeline.allocations] == [
        a.size_bytes for a in whole.timeline.allocations
    ]


def test_gradients_that_wait_on_the_host_need_no_whole_trace(recipe_of, monkeypatch):
    """An update by one kernel makes nothing, and what it is made with has come from the host: whose layer's is it?"""
    traced, trace_layers = [], tracing.trace_layers

    def counting(recipe, hf_config, *others):
        traced.append(hf_config.num_hidden_layers)
        return trace_layers(recipe, hf_config, *others)

    monkeypatch.setattr(tracing, "trace_layers", counting)
    monkeypatch.setenv("LOWMEM_FT_TRACE_PROCESSES", "1")
    in_backward = ("optimizer.in_backward=true", "accumulation.order=vertical", "checkpointing.mode=full")
    trace_recipe(recipe_of(HOST, *in_backward, layers=20), lambda: VirtualGPU("l4"))
    assert traced == [4, 5]


def test_both_directions_share_the_time_of_a_slow_link(recipe_of):
    """So slow that a step is nothing but copies: it takes about as long as those of one direction."""
    gpu = VirtualGPU("a100-80gb")
    trace = trace_recipe(recipe_of(HOST), lambda: gpu).trace
    times = Clock(trace.work).times_on(dataclasses.replace(gpu.spec, pcie_lanes=0.001))
    first, last = trace.step_ends
    took = times.ends - times.starts
    copies = sum(took[index] for index in range(first, last) if trace.work[index].kind == "copy")
    step = times.between(first, last)
    assert step.bound_by == "host copies"
    assert copies / 2 < step.seconds < 0.8 * copies  # chunks of unequal parameters
