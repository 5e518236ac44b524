"""Liger's operators in estimates: bytes, kernels and seconds on a virtual GPU, with no GPU and no Triton needed."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from tiny_models import save_llama

pytest.importorskip("liger_kernel", reason="Liger needs Triton, which this system has not")

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.estimator.traces.tracing import trace_recipe
from lowmem_ft.recipe import load_recipe
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

GPU = "h100-80gb"
LAYERS, TOKENS = 2, 512
STREAMED = (
    "checkpointing.mode=full",
    "accumulation.order=vertical",
    "offload.optimizer=host",
    "optimizer.in_backward=true",
    "offload.parameters=stream",
    "offload.activations=inputs",
    "tiling.mlp=2",
)


@pytest.fixture(name="recipe")
def _recipe(tmp_path):
    save_llama(tmp_path, layers=LAYERS, hidden=256, inner=768, heads=4, num_key_value_heads=2, vocab_size=512)
    always = (f"model={tmp_path}", "model.dtype=bfloat16", f"data.max_length={TOKENS}", "data=any")
    return lambda *settings: load_recipe(None, [*always, *settings])


def kernels_of(recipe):
    trace = trace_recipe(recipe, lambda: VirtualGPU(find_gpu(GPU))).trace
    return Counter(work.name for work in trace.work if work.kind == "kernel" for _ in range(work.times))


def test_each_module_launches_one_kernel_a_pass_in_place_of_transformers_several(recipe):
    stock, fused = kernels_of(recipe()), kernels_of(recipe("model.kernels=liger"))
    forward, backward = (fused[f"_swiglu_{name}_kernel"] // LAYERS for name in ("forward", "backward"))
    assert forward >= backward == 2  # two steps are traced
    for name, passes in (("forward", forward), ("backward", backward)):
        assert fused[f"_swiglu_{name}_kernel"] == passes * LAYERS
        assert fused[f"_rms_norm_{name}_kernel"] == passes * (2 * LAYERS + 1)
    assert fused["_triton_rope"] == (forward + backward) * LAYERS
    assert any("silu" in name for name in stock)
    assert not any("silu" in name for name in fused)
    assert sum(fused.values()) < 0.7 * sum(stock.values())


@pytest.mark.parametrize("has_triton", [True, False])
def test_weights_are_updated_without_waiting_for_loss_and_norm_by_the_kernel_alone(has_triton, recipe):
    gpu = dataclasses.replace(find_gpu(GPU), has_triton=has_triton)
    trace = trace_recipe(recipe("model.kernels=none"), lambda: VirtualGPU(gpu)).trace
    step = trace.work[slice(*trace.step_ends)]
    waits = [index for index, work in enumerate(step) if work.kind == "synchronize" or work.blocking]
    update = "update_in_triton" if has_triton else "_fused_adamw_"
    updates = [index for index, work in enumerate(step) if work.name == update]
    assert updates
    assert waits
    assert (max(updates) < waits[-1]) == has_triton
    assert (waits[-1] < min(updates)) == (not has_triton)
    assert not has_triton or not any(min(updates) < wait < max(updates) for wait in waits)


@pytest.mark.parametrize("settings", [(), ("checkpointing.mode=selective",), STREAMED])
def test_a_step_that_keeps_the_gpu_busy_takes_less_time_and_no_more_memory(settings, recipe):
    rows = "training.per_device_train_batch_size=512"  # with few, the host decides, and Triton's launches are slower
    stock, fused = (
        estimate_memory(recipe(*settings, rows, kernels), gpu=GPU)
        for kernels in ("model.kernels=none", "model.kernels=liger")
    )
    assert fused.allocated_peak_bytes <= stock.allocated_peak_bytes
    assert fused.step.seconds < stock.step.seconds


def test_auto_is_taken_for_what_it_would_be_on_a_machine_with_these_packages(recipe):
    assert kernels_of(recipe("model.kernels=auto")) == kernels_of(recipe("model.kernels=liger"))


def test_a_gpu_that_the_kernels_are_not_compiled_for_is_refused(recipe):
    with pytest.raises(UserError, match=r"model\.kernels=liger needs compute capability 8\.0, got 7\.5"):
        estimate_memory(recipe("model.kernels=liger", "model.dtype=float32"), gpu="t4")
