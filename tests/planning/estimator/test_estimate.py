"""The estimate of a recipe: what it counts, and what follows from the recipe's settings."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_models import save_llama

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.memory.comparison import estimated_peaks
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.memory.uncertainty import CONTEXT_SHARE, HEAP_SHARE_OF_RUNS, RESERVED_SHARE
from lowmem_ft.foundation.system.malloc import LARGEST_IN_HEAP_BYTES
from lowmem_ft.foundation.system.process_size import (
    CUDA_BUILD_BYTES,
    HOST_BYTES_WITH_CUDA,
    LIBRARIES_BYTES,
    TOKEN_BYTES,
)
from lowmem_ft.foundation.units import MIB
from lowmem_ft.planning.estimator import estimate_memory, estimate_on_gpus
from lowmem_ft.planning.estimator.run_host_memory import host_outside, process_bytes_on_cpu
from lowmem_ft.planning.estimator.traces.tracing import trace_recipe
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.virtual_gpu.gpu import VirtualGPU


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    return save_llama(
        path, layers=2, hidden=128, inner=256, heads=4, vocab_size=1024, max_position_embeddings=512
    )


@pytest.fixture
def make_recipe(folder):
    def make(*settings: str) -> Recipe:
        return load_recipe(None, [f"model={folder}", "data.max_length=128", *settings])

    return make


def chosen(estimate: MemoryEstimate, what: str) -> str:
    return next(choice for choice in estimate.choices if choice.startswith(f"{what}: "))


def test_the_knobs_that_are_turned_are_named_and_no_others(make_recipe):
    on_host = ("optimizer.in_backward=true", "offload.optimizer=host", "offload.parameters=stream")
    lowest = ("model.dtype=bfloat16", "checkpointing.mode=full", "optimizer.state=8bit", *on_host)
    said = chosen(estimate_memory(make_recipe(*lowest), "l4"), "recipe")
    assert said == (
        "recipe: bfloat16 weights, mixed precision no, optimizer adamw, checkpointing full, loss in chunks of 1024 "
        "tokens, optimizer.state=8bit, optimizer.in_backward=true, offload.optimizer=host, offload.parameters=stream"
    )


def test_weights_gradients_and_state_are_counted_to_the_byte(make_recipe):
    estimate = estimate_memory(make_recipe(), "cpu")
    weights = 4 * estimate.model.parameters
    assert estimate.model.trainable_parameters == estimate.model.parameters
    assert estimate.by_category_at_peak["optimizer_state"] == pytest.approx(2 * weights, rel=1e-4)
    assert sum(estimate.by_category_at_peak.values()) == estimate.allocated_peak_bytes
    assert estimate.allocated_peak_bytes == max(estimate.by_phase.values())
    assert estimate.by_phase["load"] >= weights
    assert estimate.by_phase[estimate.peak_phase] == estimate.allocated_peak_bytes


def test_the_json_holds_the_published_fields(make_recipe):
    values = estimate_memory(make_recipe(), "l4").to_json()
    assert values["schema"] == 1
    assert set(values) == {
        *("schema", "model", "gpu", "device", "host", "by_category_at_peak", "by_phase", "peak_at"),
        *(
            "step",
            "budget",
            "fits",
            "verdict",
            "tight",
            "choices",
            "not_modelled",
            "versions",
            "trace_seconds",
        ),
        *("uncertainty", "processes"),
    }
    assert values["gpu"] == {
        "name": "l4",
        "memory_bytes": find_gpu("l4").memory_bytes,
        "held_by_others_bytes": 0,
        "context_is_estimate": False,
    }
    device = values["device"]
    assert device["allocated_peak_bytes"] <= device["reserved_peak_bytes"] < device["process_low_bytes"]
    assert device["process_low_bytes"] < device["process_peak_bytes"] < device["process_high_bytes"]
    assert values["uncertainty"] == {"reserved_share": RESERVED_SHARE, "outside_share": CONTEXT_SHARE}
    assert sum(values["host"]["by_part_at_peak"].values()) == values["host"]["peak_bytes"]


def test_the_batch_and_the_settings_are_said(make_recipe):
    estimate = estimate_memory(
        make_recipe(
            "training.per_device_train_batch_size=2",
            "training.gradient_accumulation_steps=3",
            "checkpointing.mode=full",
        ),
        "l4",
    )
    assert chosen(estimate, "batch") == "batch: 2 x 128 tokens, 3 a step"
    assert "float32 weights" in chosen(estimate, "recipe")
    assert "checkpointing full" in chosen(estimate, "recipe")
    assert estimate.step is not None
    assert estimate.step.tokens == 2 * 3 * 128


def test_accumulation_takes_time_for_each_micro_batch_and_memory_for_one(make_recipe):
    def step(num: int) -> MemoryEstimate:
        return estimate_memory(make_recipe(f"training.gradient_accumulation_steps={num}"), "l4")

    two, three, ten = step(2), step(3), step(10)
    assert two.step
    assert three.step
    assert ten.step
    one_more = three.step.seconds - two.step.seconds
    assert one_more > 0
    assert ten.step.seconds - two.step.seconds == pytest.approx(8 * one_more, rel=1e-6)
    assert ten.allocated_peak_bytes == two.allocated_peak_bytes


def test_evaluation_is_estimated_where_there_is_held_out_data_at_its_own_batch_size(make_recipe):
    assert "evaluation" not in estimate_memory(make_recipe(), "cpu").by_phase

    def evaluation(num_rows: int) -> int:
        estimate = estimate_memory(
            make_recipe("data.eval_size=8", f"training.per_device_eval_batch_size={num_rows}"), "cpu"
        )
        return estimate.by_phase["evaluation"]

    assert evaluation(8) > evaluation(1)


def test_without_an_evaluation_batch_size_it_is_that_of_training(make_recipe):
    rows = ["data.eval_size=8", "training.per_device_train_batch_size=4"]
    unset = estimate_memory(make_recipe(*rows), "cpu")
    same = estimate_memory(make_recipe(*rows, "training.per_device_eval_batch_size=4"), "cpu")
    assert unset.by_phase == same.by_phase


def test_host_memory_is_the_process_and_what_is_loaded_or_saved(make_recipe):
    on_gpu = estimate_memory(make_recipe(), "l4")
    weights = 4 * on_gpu.model.parameters  # fewer than a file holds
    base = HOST_BYTES_WITH_CUDA
    assert base + weights <= on_gpu.host_peak_bytes <= base + weights + MIB
    on_cpu, process = estimate_memory(make_recipe(), "cpu"), process_bytes_on_cpu(1024)
    assert on_cpu.host_peak_bytes == on_cpu.process_peak_bytes == process + on_cpu.reserved_peak_bytes
    assert on_cpu.process_range.low_bytes < process + on_cpu.allocated_peak_bytes < on_cpu.process_peak_bytes


@pytest.mark.parametrize("cuda,of_build", [(None, 0), ("12.8", CUDA_BUILD_BYTES)])
def test_a_process_is_its_libraries_by_the_build_of_torch_and_its_tokenizer(monkeypatch, cuda, of_build):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert process_bytes_on_cpu() == LIBRARIES_BYTES + of_build
    assert process_bytes_on_cpu(50_000) - process_bytes_on_cpu() == 50_000 * TOKEN_BYTES


def peak_event(estimate):
    live = list(estimate.timeline.live_bytes())
    return live.index(max(live))


def test_on_a_cpu_the_heap_keeps_something_once_a_step_has_freed_it(make_recipe):
    wide = make_recipe("data.eval_size=8", "training.per_device_train_batch_size=512")
    estimate = estimate_memory(wide, "cpu")
    peaks, parts = estimated_peaks(estimate), estimate.host_by_part_at_peak
    assert parts["heap"] == estimate.reserved_peak_bytes - estimate.allocated_peak_bytes > 0
    alive = [
        estimate.timeline.allocations[index] for index in estimate.timeline.alive_at(peak_event(estimate))
    ]
    small = [tensor.size_bytes for tensor in alive if tensor.size_bytes < LARGEST_IN_HEAP_BYTES]
    assert 0 < len(small) < len(alive)
    assert parts["heap"] == round(HEAP_SHARE_OF_RUNS * sum(small))
    for phase in ("load", "evaluation"):
        assert peaks.by_phase[phase] == estimate.by_phase[phase] + parts["process"]
    assert peaks.peak_bytes == max(peaks.by_phase.values())


def test_what_the_system_takes_back_at_once_the_heap_does_not_keep(make_recipe):
    wide = make_recipe("training.per_device_train_batch_size=2048")
    estimate = estimate_memory(wide, "cpu")
    kept = estimate.host_by_part_at_peak["heap"]
    assert 0 < kept < HEAP_SHARE_OF_RUNS * estimate.allocated_peak_bytes / 2


STREAMED = (
    *("model.dtype=bfloat16", "optimizer.master=split24", "optimizer.in_backward=true"),
    *("accumulation.order=vertical", "checkpointing.mode=full", "offload.optimizer=host"),
    "offload.parameters=stream",
)


def saving_bytes(recipe: Recipe) -> int:
    traced = trace_recipe(recipe, lambda: VirtualGPU("l4"))
    return host_outside(traced, recipe, on_gpu=True).saving_bytes


def test_files_are_written_from_where_streamed_weights_rest(make_recipe):
    """All but the last norm and buffers rests on the host; the two slots on the device are no weights of their own."""
    assert 2 * 128 <= saving_bytes(make_recipe(*STREAMED)) < 1000
    stays = saving_bytes(make_recipe(*STREAMED, "offload.resident_layers=1"))
    assert stays > 2 * 3 * 128 * 256  # the MLP of the layer that stays


def test_a_run_of_adapters_writes_nothing_else(make_recipe):
    pytest.importorskip("peft")
    recipe = make_recipe("adapter.name=lora", "adapter.r=2")
    trained = estimate_memory(recipe, "l4").model.trainable_parameters
    assert 0 < saving_bytes(recipe) == 4 * trained


def test_a_gpu_of_ones_own_is_as_good_as_one_of_the_catalogue(make_recipe):
    small = dataclasses.replace(find_gpu("l4"), name="small", memory_bytes=200 * MIB)
    estimate = estimate_memory(make_recipe(), small)
    assert (estimate.gpu.name, estimate.gpu.memory_bytes) == ("small", 200 * MIB)
    assert estimate.budget.device_bytes == 200 * MIB
    assert not estimate.fits


def test_the_budget_is_the_limit_whether_of_the_recipe_or_given(make_recipe):
    of_recipe = estimate_memory(make_recipe("budget=2GiB"), "l4")
    given = estimate_memory(make_recipe(), "l4", budget=Budget(device="2GiB"))
    assert of_recipe.budget == given.budget
    assert of_recipe.budget.device_bytes == 2 * 1024 * MIB
    assert not estimate_memory(make_recipe(), "l4", budget=Budget(device="200MiB")).fits
    assert not estimate_memory(make_recipe(), "l4", budget=Budget(host="1GiB")).fits


def test_a_budget_that_the_gpu_does_not_have_is_said(make_recipe):
    estimate = estimate_memory(make_recipe("budget=24GiB"), "t4")
    assert estimate.budget.device_bytes == find_gpu("t4").memory_bytes
    assert "budget.device=24GiB is more" in chosen(estimate, "limit")


def test_without_a_gpus_name_the_choice_is_said(make_recipe, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert estimate_memory(make_recipe()).gpu.name.startswith("cpu")
    bought = estimate_memory(make_recipe("budget=24GiB"))
    assert chosen(bought, "device").startswith(
        f"device: {bought.gpu.name}, the cheapest GPU by the hour in the catalogue"
    )


def test_of_this_machines_gpu_what_others_hold_is_not_there(make_recipe, cuda_driver):
    driver = cuda_driver()
    alone = estimate_memory(make_recipe())
    assert alone.gpu.name == "h100-80gb"
    assert (alone.fits, alone.gpu.held_by_others_bytes) == (True, 0)
    driver.bytes["others"] = 80 * 1024 * MIB - driver.bytes["context"]
    crowded = estimate_memory(make_recipe())
    assert not crowded.fits
    assert crowded.process_peak_bytes == alone.process_peak_bytes
    assert crowded.headroom_bytes is not None
    assert crowded.headroom_bytes < 0
    assert "other processes and a display on the GPU" not in crowded.not_modelled
    elsewhere = estimate_memory(make_recipe(), "h100-80gb")
    assert elsewhere.fits
    assert elsewhere.gpu.held_by_others_bytes == 0


def test_many_gpus_get_what_each_alone_gets(make_recipe):
    recipe = make_recipe("training.mixed_precision=fp16")
    names = ["l4", "t4", "rtx-4090", "h100-80gb"]
    for name, together in zip(
        names, estimate_on_gpus(recipe, [find_gpu(name) for name in names]), strict=True
    ):
        assert isinstance(together, MemoryEstimate)
        alone = estimate_memory(recipe, name)
        assert dataclasses.replace(together, trace_seconds=0.0) == dataclasses.replace(
            alone, trace_seconds=0.0
        )


def test_no_attention_of_a_gpu_is_asked_for_where_streamed_weights_wait(make_recipe):
    """Its kernels take no tensors of the host, on which the loss is compared with the stock one before the run."""
    settings = (
        "model.attn_implementation=flash_attention_2",
        "model.dtype=bfloat16",
        "training.mixed_precision=no",
        "offload.parameters=stream",
        "offload.optimizer=host",
        "optimizer.in_backward=true",
        "accumulation.order=vertical",
        "checkpointing.mode=full",
    )
    estimate = estimate_memory(make_recipe(*settings), "rtx-4090")
    assert "attention: flash-attn 2, which has to be installed where the run is" in estimate.choices
