"""A model alone: what it needs in full, with LoRA and with QLoRA."""

from __future__ import annotations

import dataclasses

import pytest
from tiny_models import save_llama

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.units import MIB
from lowmem_ft.planning.estimator import CannotRun, estimate_memory, estimate_methods
from lowmem_ft.planning.estimator.estimate import SharedTraces
from lowmem_ft.planning.estimator.method_estimates import NOT_TRIED_IN_FLOAT32
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.recipe import load_recipe
from lowmem_ft.recipe.shipped.fine_tuning_methods import METHODS, methods_with

FULL = ["adapter.name=none"]
SHORT = [
    "data.max_length=64",
    "training.per_device_train_batch_size=1",
    "training.gradient_accumulation_steps=2",
]
GPUS = [find_gpu(name) for name in ("t4", "rtx-4090", "h100-80gb")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    return save_llama(
        path, layers=1, hidden=64, inner=128, heads=2, vocab_size=256, max_position_embeddings=64
    )


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def results(folder, said):
    return estimate_methods(
        folder, GPUS, settings=["budget.host=64GiB"], is_thorough=False, on_start=said.append
    )


def of(results, method: str, gpu: str):
    return next(each for each in results if (each.method.name, each.gpu.name) == (method, gpu))


def test_each_method_is_estimated_on_each_gpu_in_their_order(results):
    expected = [(method.name, gpu.name) for method in METHODS for gpu in GPUS]
    assert [(each.method.name, each.gpu.name) for each in results] == expected
    assert all(each.fits == (each.estimate is not None) for each in results)
    assert {each.estimate.gpu.name == each.gpu.name for each in results if each.estimate} == {True}
    assert {each.estimate.budget.host_bytes for each in results if each.estimate} == {64 * 1024 * MIB}


def test_full_fine_tuning_is_by_the_fastest_recipe_that_fits(results):
    assert [of(results, "full", gpu).rung for gpu in ("rtx-4090", "h100-80gb")] == ["8b-bf16"] * 2


def card(mib: float, like: str = "rtx-4090") -> Gpu:
    """A card with so much, and a context that is nothing beside it."""
    card = find_gpu(like)
    return dataclasses.replace(card, name=f"card-{mib}", memory_bytes=int(mib * MIB), context_bytes=MIB)


@pytest.fixture(scope="module")
def kept() -> KeptTraces:
    return KeptTraces()


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> str:
    """A model that is large enough for the recipes to differ."""
    path = tmp_path_factory.mktemp("large")
    return save_llama(path, layers=24, hidden=512, inner=1408, heads=8, vocab_size=8192)


@pytest.fixture(scope="module")
def rungs(large, kept):
    """On cards from too small to ample. On the Hopper, cuBLAS takes 40 MiB more than on the others."""
    cards = [*map(card, (900, 100, 400, 170, 290, 310)), card(312, like="h100-80gb")]
    return estimate_methods(large, cards, settings=[*FULL, *SHORT], is_thorough=False, kept=kept)


def test_each_card_has_the_fastest_recipe_that_it_has_room_for(rungs, kept):
    found = {each.gpu.name: each for each in rungs}
    by_size = [found[f"card-{mib}"] for mib in (100, 170, 290, 400, 900)]
    assert [each.fits for each in by_size] == [False, True, True, True, True]
    # What takes the least is shown where nothing fits; on 290 MiB the 281 of 8b-24gb would be tight.
    assert [each.rung for each in by_size] == ["8b-8gb", "8b-8gb", "8b-16gb", "8b-24gb", "8b-bf16"]
    smallest = by_size[1]  # by the recipe with the most techniques
    own = estimate_memory(as_recipe(smallest.command), smallest.gpu, kept=kept)
    assert own.process_peak_bytes == smallest.estimate.process_peak_bytes
    assert own.fits


def test_the_recipe_between_keeps_a_share_of_the_layers(rungs):
    """8 of Qwen3-8B's 36 layers stay on a 16 GB card: 5 of 24."""
    (between,) = {each.command for each in rungs if each.gpu.name == "card-290"}
    assert between[0] == "recipe=8b-16gb"
    assert "offload.resident_layers=5" in between


def test_many_cards_are_told_what_each_is_told_alone(rungs, large, kept):
    """The rung between was left out for many, and one that a larger card had no room for was tried on none below it."""
    assert {each.rung for each in rungs} == {"8b-bf16", "8b-24gb", "8b-16gb", "8b-8gb"}
    for each in (each for each in rungs if each.gpu.name in ("card-170", "card-290")):
        (alone,) = estimate_methods(large, [each.gpu], settings=[*FULL, *SHORT], kept=kept)
        assert alone.command == each.command
        assert without_step(alone) == without_step(each)
        # Cards share a trace; in it a norm's backward pass has a program for each multiprocessor of the first.
        assert step_of(alone) == pytest.approx(step_of(each), rel=1e-4)


def without_step(result):
    return dataclasses.replace(result.estimate, trace_seconds=0.0, step=None)


def step_of(result):
    step = result.estimate.step
    return (step.seconds, step.tokens, step.sent_bytes, step.seconds_share, step.host_share)


def test_the_lowest_rung_streams_everything(rungs):
    recipe = as_recipe(next(each for each in rungs if each.rung == "8b-8gb").command)
    assert (recipe.offload.parameters, recipe.offload.optimizer) == ("stream", "host")
    assert (recipe.optimizer.master, recipe.optimizer.state) == ("split24", "8bit")
    assert recipe.optimizer.in_backward
    assert recipe.tiling.head > 1
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


def test_where_they_do_not_fit_they_are_streamed_for_a_gpu_that_is_asked_for_by_name(folder):
    small = dataclasses.replace(find_gpu("t4"), memory_bytes=100 * MIB)  # less than the process itself takes
    (full,) = estimate_methods(folder, [small], settings=FULL)
    recipe = as_recipe(full.command)
    assert (recipe.model.dtype, recipe.optimizer.master) == ("float32", "fp32")
    assert recipe.offload.parameters == "stream"
    assert full.estimate is not None
    full, large = estimate_methods(folder, [small, find_gpu("v100-32gb")], settings=FULL, is_thorough=False)
    assert full.problems == (NOT_TRIED_IN_FLOAT32,)
    assert large.fits


def test_weights_that_are_larger_than_the_gpu_are_not_traced_there(folder):
    tiny = dataclasses.replace(find_gpu("t4"), memory_bytes=1000)
    said = []
    estimate_methods(folder, [tiny], settings=FULL, is_thorough=False, on_start=said.append)
    assert said == []


def test_rows_are_no_longer_than_the_model_takes(results):
    for each in results:
        if each.estimate:
            assert as_recipe(each.command).data.max_length == 64


def test_two_kinds_of_gpu_are_traced_once_for_settings(said, results):
    assert len(said) == len(set(said))
    assert said[0] == "full by 8b-bf16 on GPUs with bfloat16"
    assert "LoRA by 7b-lora, 1 row, all activations kept on GPUs without bfloat16" in said


@pytest.mark.parametrize("gpu", ["h100-80gb", "t4"])
def test_the_printed_command_has_the_numbers_of_the_table(results, gpu):
    """The table timed a step of one micro-batch, its command one of 16. On a Hopper, cuBLAS takes 32 MiB, else 8."""
    shared = of(results, "lora", gpu)
    own = estimate_memory(as_recipe(shared.command), gpu)
    assert own.step.tokens == shared.estimate.step.tokens
    assert own.step.seconds == pytest.approx(shared.estimate.step.seconds, rel=0.01)
    assert own.process_peak_bytes == pytest.approx(shared.estimate.process_peak_bytes, rel=0.01)
    assert own.by_category_at_peak == shared.estimate.by_category_at_peak


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_where_everything_fits_nothing_is_computed_again(results, method):
    """Though the recipe that it begins with may compute some."""
    checkpointing = as_recipe(of(results, method, "h100-80gb").command).checkpointing
    assert (checkpointing.mode, checkpointing.mlp_activation) == ("none", "keep")


def test_all_methods_of_a_gpu_step_over_as_many_tokens(results):
    assert len({each.estimate.step.tokens for each in results if each.estimate}) == 1


def as_recipe(command):
    name, *settings = command
    return load_recipe(name.removeprefix("recipe="), settings)


def test_a_method_that_the_model_does_not_go_with_says_why_and_the_others_are_there(folder, monkeypatch):
    class Refusing(SharedTraces):
        def estimate(self, gpu):
            if self._recipe.adapter.name == "none":
                return CannotRun(gpu=gpu, problems=("This head cannot be streamed.",))
            return super().estimate(gpu)

    monkeypatch.setattr("lowmem_ft.planning.estimator.methods.places.SharedTraces", Refusing)
    full, lora = estimate_methods(folder, [find_gpu("rtx-4090")], settings=["model.quantization=none"])
    assert (full.estimate, full.problems) == (None, ("This head cannot be streamed.",))
    assert lora.fits


def test_settings_choose_the_methods_and_go_into_each(folder):
    gpu = [find_gpu("rtx-4090")]

    def methods(*settings: str) -> list[str]:
        return [method.name for method in methods_with(settings)]

    assert methods() == methods("data.max_length=32") == ["full", "lora", "qlora"]
    assert methods("adapter.name=lora") == ["lora"]
    assert methods("adapter.r=4") == ["lora", "qlora"]
    assert methods("adapter.name=lora", "model.quantization=nf4") == ["qlora"]
    assert methods("model.quantization=nf4") == ["qlora"]
    assert methods("model.quantization=none") == ["full", "lora"]
    assert methods("adapter.name=none") == ["full"]

    typed = ["data.max_length=32", "training.gradient_accumulation_steps=4"]
    for each in estimate_methods(folder, gpu, settings=typed):
        recipe = as_recipe(each.command)
        assert each.row_tokens == recipe.data.max_length == 32
        assert recipe.model.dtype == "bfloat16"
        assert each.estimate.step.tokens == 16 * 32


@pytest.mark.parametrize(
    "typed, rows",
    [
        pytest.param(["training.per_device_train_batch_size=2"], 16, marks=pytest.mark.slow),
        pytest.param(["training.gradient_accumulation_steps=2"], 16, marks=pytest.mark.slow),
        pytest.param(["training.per_device_train_batch_size=32"], 32, marks=pytest.mark.slow),
        (["training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=3"], 6),
    ],
)
def test_all_methods_step_after_as_many_rows(folder, typed, rows):
    gpus = [card(12, "rtx-4090"), find_gpu("h100-80gb"), find_gpu("t4")]
    results = estimate_methods(folder, gpus, settings=["data.max_length=32", *typed])
    for each in results:
        training = as_recipe(each.command).training
        assert training.per_device_train_batch_size * training.gradient_accumulation_steps == rows, (
            each.command
        )
        values = [setting.split("=") for setting in each.command]
        assert len({key for key, _ in values}) == len(values), each.command
    assert len({as_recipe(each.command).accumulation.order for each in results}) == 2


def test_a_length_that_was_typed_is_not_cut_to_what_the_model_takes(folder):
    (lora,) = estimate_methods(
        folder, [find_gpu("rtx-4090")], settings=["adapter.name=lora", "data.max_length=128"]
    )
    assert lora.estimate is None
    assert "at most what the model takes" in lora.problems[0]
