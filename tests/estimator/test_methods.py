"""A model alone: what it needs in full, with LoRA and with QLoRA."""

from __future__ import annotations

import dataclasses

import pytest
from transformers import LlamaConfig

from lowmem_ft.catalog.gpus import find_gpu
from lowmem_ft.errors import ModelError
from lowmem_ft.estimator import estimate_memory, estimate_methods
from lowmem_ft.estimator.methods import METHODS, NOT_STREAMED_IN_FLOAT32
from lowmem_ft.recipe import load_recipe
from lowmem_ft.units import MIB

GPUS = [find_gpu(name) for name in ("t4", "rtx-4090", "h100-80gb")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=256,
        max_position_embeddings=64,
    ).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def results(folder, said):
    return estimate_methods(
        folder, GPUS, settings=["budget.host=64GiB"], float32_streaming=False, on_start=said.append
    )


def of(results, method: str, gpu: str):
    return next(each for each in results if (each.method.name, each.gpu.name) == (method, gpu))


def test_each_method_is_estimated_on_each_gpu_in_their_order(results):
    expected = [(method.name, gpu.name) for method in METHODS for gpu in GPUS]
    assert [(each.method.name, each.gpu.name) for each in results] == expected
    assert all(each.fits == (each.estimate is not None) for each in results)
    assert {each.estimate.gpu.name == each.gpu.name for each in results if each.estimate} == {True}
    assert {each.estimate.budget.host_bytes for each in results if each.estimate} == {64 * 1024 * MIB}


def test_full_fine_tuning_is_at_the_lowest_rung(results):
    recipe = as_recipe(of(results, "full", "rtx-4090").command)
    assert (recipe.offload.parameters, recipe.offload.optimizer) == ("stream", "host")
    assert (recipe.optimizer.master, recipe.optimizer.state) == ("split24", "8bit")
    assert recipe.optimizer.in_backward
    assert recipe.tiling.mlp > 1 < recipe.tiling.head
    assert recipe.training.gradient_accumulation_steps > 1  # weights cross PCIe once for all of them


def test_without_bfloat16_adapters_take_float16(results):
    for method in ("lora", "qlora"):
        recipe = as_recipe(of(results, method, "t4").command)
        assert (recipe.model.dtype, recipe.training.mixed_precision) == ("float16", "fp16")
        assert of(results, method, "t4").fits


def test_without_bfloat16_float32_weights_that_fit_stay_on_the_gpu(results):
    full = of(results, "full", "t4")
    assert full.fits
    assert full.command[0] == "recipe=1b-fp16-t4"
    recipe = as_recipe(full.command)
    assert (recipe.model.dtype, recipe.training.mixed_precision) == ("float32", "fp16")
    assert recipe.offload.parameters == "device"


def test_where_they_do_not_fit_they_are_streamed_for_a_gpu_that_is_asked_for_by_name(folder, monkeypatch):
    monkeypatch.setattr("lowmem_ft.estimator.methods.METHODS", METHODS[:1])
    small = dataclasses.replace(find_gpu("t4"), memory_bytes=100 * MIB)  # less than the process itself takes
    (full,) = estimate_methods(folder, [small])
    recipe = as_recipe(full.command)
    assert (recipe.model.dtype, recipe.optimizer.master) == ("float32", "fp32")
    assert recipe.offload.parameters == "stream"
    assert full.estimate is not None
    full, large = estimate_methods(folder, [small, find_gpu("v100-32gb")], float32_streaming=False)
    assert full.problems == (NOT_STREAMED_IN_FLOAT32,)
    assert large.fits


def test_weights_that_are_larger_than_the_gpu_are_not_traced_there(folder, monkeypatch):
    monkeypatch.setattr("lowmem_ft.estimator.methods.METHODS", METHODS[:1])
    tiny = dataclasses.replace(find_gpu("t4"), memory_bytes=1000)
    said = []
    estimate_methods(folder, [tiny], float32_streaming=False, on_start=said.append)
    assert said == []


def test_rows_are_no_longer_than_the_model_takes(results):
    for each in results:
        if each.estimate:
            assert as_recipe(each.command).data.max_length == 64


def test_two_kinds_of_gpu_are_traced_once_a_method(said, results):
    assert len(said) == 6
    assert said[0] == "full on GPUs with bfloat16"


def test_gpus_that_share_a_trace_take_what_their_own_says(results):
    """cuBLAS's workspaces are 32 MiB from Hopper on, 8 before; attention is another kernel that takes as much."""
    shared = of(results, "lora", "h100-80gb")
    as_traced = [
        "data.eval_split=null",
        "training.eval_steps=null",
        "training.gradient_accumulation_steps=1",
    ]
    own = estimate_memory(as_recipe((*shared.command, *as_traced)), "h100-80gb")
    assert own.process_peak_bytes == shared.estimate.process_peak_bytes
    assert own.by_category_at_peak == shared.estimate.by_category_at_peak
    speed = shared.estimate.step.tokens_per_second / own.step.tokens_per_second
    assert 0.9 < speed < 1.1


def as_recipe(command):
    name, *settings = command
    return load_recipe(name.removeprefix("recipe="), settings)


def test_a_method_that_the_model_does_not_go_with_says_why_and_the_others_are_there(
    folder, results, monkeypatch
):
    def refuses(recipe, gpus, **keywords):
        raise ModelError("This head cannot be streamed.")

    plain = of(results, "lora", "rtx-4090").estimate
    monkeypatch.setattr("lowmem_ft.estimator.methods.METHODS", METHODS[:2])
    monkeypatch.setattr(
        "lowmem_ft.estimator.methods.estimate_on_gpus",
        lambda recipe, gpus, **keywords: refuses(recipe, gpus) if recipe.adapter.name == "none" else [plain],
    )
    full, lora = estimate_methods(folder, [find_gpu("rtx-4090")])
    assert (full.estimate, full.problems) == (None, ("This head cannot be streamed.",))
    assert lora.fits


def test_a_model_that_there_is_not_is_an_error_at_once():
    with pytest.raises(ModelError, match=r"Did you mean `llama-3.1-8b`"):
        estimate_methods("lama-3.1-8b", GPUS)
