from __future__ import annotations

import dataclasses
import operator

import pytest
from tiny_models import save_llama

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu, load_gpus
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.units import MIB
from lowmem_ft.planning.estimator import changes as changes_module
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.estimator.changes import Changes, ChangeSearch
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.recipe.space.remediations import remediations_for

GREEDY = ["training.per_device_train_batch_size=4", "loss.chunk_tokens=null"]
LEAN = [
    "loss.chunk_tokens=64",
    "tiling.head=8",
    "checkpointing.mode=full",
    "adapter.name=lora",
    "model.dtype=bfloat16",
    "training.mixed_precision=bf16",
    "model.quantization=nf4",
    "offload.activations=inputs",
    "offload.parameters=stream",
    "data.max_length=512",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    return save_llama(
        path, layers=1, hidden=512, inner=1024, heads=8, vocab_size=8192, max_position_embeddings=1024
    )


@pytest.fixture
def recipe(folder) -> Recipe:
    return make_recipe(folder, *GREEDY)


@pytest.fixture
def few_bytes(recipe, monkeypatch):
    """An estimator at once: what each change frees of 100 bytes, and a device of some bytes."""
    plain = estimate_memory(recipe, "l4")

    def pretend(freed: dict[str, int], device: int) -> None:
        def estimated(changed: Recipe, gpu, *, budget, kept=None) -> MemoryEstimate:
            uses_bfloat16 = "bfloat16" in changed.model.dtype or "bf16" in changed.training.mixed_precision
            if uses_bfloat16 and not find_gpu(gpu).has_bfloat16:
                raise UserError("bfloat16 needs a GPU that computes with it.")
            needs = 100 - sum(count for override, count in freed.items() if has(changed, override))
            return dataclasses.replace(plain, fits=needs <= device, process_peak_bytes=needs)

        monkeypatch.setattr("lowmem_ft.planning.estimator.changes.estimate_memory", estimated)

    return pretend


def has(recipe: Recipe, override: str) -> bool:
    key, _, value = override.partition("=")
    return str(operator.attrgetter(key)(recipe)).lower() == value


def cheapest_changes(recipe: Recipe, gpu, budget: Budget | None = None, **options) -> Changes:
    search = ChangeSearch(recipe, gpu, budget=budget, **options)
    assert len(list(search)) <= 3
    return search.found(complete=True)


def make_recipe(folder: str, *settings: str) -> Recipe:
    return load_recipe(None, [f"model={folder}", "model.weights=random", "data.max_length=1024", *settings])


def make_gpu(memory_bytes: int, like: str = "l4") -> Gpu:
    return dataclasses.replace(load_gpus()[like], memory_bytes=memory_bytes)


def needs(recipe: Recipe) -> int:
    return estimate_memory(recipe, "l4").process_high_bytes


def dearest(recipe: Recipe, changed: Recipe) -> int:
    """The place of the dearest change that has been made, in the order of costs."""
    return max(
        index for index, way in enumerate(remediations_for(recipe)) if way.applied_to(changed) == changed
    )


def test_single_changes_that_fit_come_first_and_really_fit(folder):
    settings = [*GREEDY, "adapter.name=lora", "model.dtype=bfloat16"]
    recipe = make_recipe(folder, *settings)
    gpu = make_gpu(needs(make_recipe(folder, *settings, "loss.chunk_tokens=1024")) + MIB)
    assert not estimate_memory(recipe, gpu).fits
    changes = cheapest_changes(recipe, gpu).fitting
    assert changes[0].overrides == ("loss.chunk_tokens=1024",)
    order = []
    for change in changes:
        changed = make_recipe(folder, *settings, *change.overrides)
        order.append(dearest(recipe, changed))
    assert order == sorted(set(order))
    again = estimate_memory(changed, gpu)
    assert again.fits
    assert again.process_peak_bytes == change.estimate.process_peak_bytes


def test_changes_combine_where_one_is_not_enough_and_none_is_needless(recipe, few_bytes):
    few_bytes({"loss.chunk_tokens=1024": 10, "tiling.head=8": 5, "optimizer.state=8bit": 30}, device=60)
    changes = cheapest_changes(recipe, "l4").fitting
    assert [change.overrides for change in changes] == [("loss.chunk_tokens=1024", "optimizer.state=8bit")]
    assert changes[0].estimate.process_peak_bytes == 60


def test_three_ways_are_found_each_without_the_dearest_change_of_the_others(recipe, few_bytes):
    few_bytes(
        {"loss.chunk_tokens=1024": 10, "checkpointing.mode=full": 50, "adapter.name=lora": 60}, device=50
    )
    changes = cheapest_changes(recipe, "l4").fitting
    assert [change.overrides for change in changes] == [
        ("checkpointing.mode=full",),
        ("checkpointing.mode=full", "accumulation.order=vertical", "optimizer.in_backward=true"),
        ("checkpointing.mode=full", "offload.activations=inputs"),
    ]


def test_where_nothing_helps_nothing_is_offered_and_what_is_missing_is_known(recipe, few_bytes):
    few_bytes({"loss.chunk_tokens=1024": 10}, device=50)
    changes = cheapest_changes(recipe, "l4")
    assert changes.fitting == ()
    together = changes.all_together
    assert together is not None
    assert together.estimate.process_peak_bytes == 90
    keys = {key for way in remediations_for(recipe) for key in way.settings}
    assert keys - {override.partition("=")[0] for override in together.overrides} == {
        "optimizer.master"  # of LoRA, as it was
    }


def test_an_answer_takes_few_estimates(recipe, few_bytes, monkeypatch):
    few_bytes(
        {"loss.chunk_tokens=1024": 10, "optimizer.state=8bit": 30, "data.max_length=512": 30}, device=40
    )
    made = []
    estimated = changes_module.estimate_memory
    monkeypatch.setattr(
        changes_module,
        "estimate_memory",
        lambda *args, **kwargs: made.append(1) or estimated(*args, **kwargs),
    )
    assert cheapest_changes(recipe, "l4").fitting
    assert len(made) < 25


def recipes_estimated(monkeypatch) -> list[Recipe]:
    """The recipes that are estimated from here on, in order."""
    made = []
    estimated = changes_module.estimate_memory

    def counted(changed: Recipe, *args, **kwargs) -> MemoryEstimate:
        made.append(changed)
        return estimated(changed, *args, **kwargs)

    monkeypatch.setattr(changes_module, "estimate_memory", counted)
    return made


def test_with_long_traces_a_first_answer_is_enough(recipe, few_bytes, monkeypatch):
    """And nothing is estimated that gives up the mathematics, where something fits that does not."""
    few_bytes({"offload.optimizer=host": 60, "offload.activations=inputs": 10}, device=35)
    monkeypatch.setattr(changes_module, "ENOUGH_EVENTS", 1)
    made = recipes_estimated(monkeypatch)
    changes = cheapest_changes(recipe, "l4")
    (change,) = changes.fitting
    assert {"offload.optimizer=host", "offload.activations=inputs"} <= set(change.overrides)
    assert changes.all_together is None
    assert all(changed.adapter.name == "none" for changed in made)
    assert len(made) < 15


class Known:
    """An outlook that knows what each change frees of 100 bytes."""

    def __init__(self, freed: dict[str, int], device: int, error: int = 0) -> None:
        self.freed, self.device, self.error = freed, device, error

    def needs(self, recipe: Recipe) -> int:
        return 100 - sum(count for override, count in self.freed.items() if has(recipe, override))

    def cannot_fit(self, recipe: Recipe) -> bool:
        return self.needs(recipe) > 1.2 * self.device

    def should_fit(self, recipe: Recipe) -> bool:
        return self.needs(recipe) + self.error <= self.device


FREED = {"loss.chunk_tokens=1024": 10, "offload.optimizer=host": 50, "offload.activations=inputs": 10}


@pytest.mark.parametrize("error", [0, -15, 15], ids=["right", "hopeful", "fearful"])
def test_bounds_and_expectations_save_estimates_and_change_no_answer(recipe, few_bytes, monkeypatch, error):
    few_bytes(FREED, device=40)
    monkeypatch.setattr(changes_module, "ENOUGH_EVENTS", 1)
    made = recipes_estimated(monkeypatch)
    plain = cheapest_changes(recipe, "l4").fitting
    num_plain = len(made)
    told = cheapest_changes(recipe, "l4", outlook=Known(FREED, 40, error)).fitting
    assert [change.overrides for change in told] == [change.overrides for change in plain]
    assert "offload.optimizer=host" in plain[0].overrides
    assert len(made) - num_plain < num_plain
    if not error:
        assert len(made) - num_plain <= 3


def test_a_gpu_without_bfloat16_is_offered_float16(folder, few_bytes):
    recipe = make_recipe(folder, "loss.chunk_tokens=64", "checkpointing.mode=full", "adapter.name=lora")
    few_bytes({"model.dtype=float16": 50}, device=50)
    changes = cheapest_changes(recipe, "t4")
    assert changes.fitting[0].overrides == ("training.mixed_precision=fp16", "model.dtype=float16")
    offered = [override for change in changes.fitting for override in change.overrides]
    assert offered
    assert not any("bf" in override for override in offered)


def test_a_recipe_with_nothing_left_to_change_gets_no_offer(folder):
    changes = cheapest_changes(make_recipe(folder, *LEAN), make_gpu(100 * MIB))
    assert (changes.fitting, changes.all_together) == ((), None)


@pytest.mark.slow
def test_a_budget_is_what_has_to_be_fitted(folder, recipe):
    chunked = make_recipe(folder, *GREEDY, "loss.chunk_tokens=1024")
    budget = Budget(device=f"{needs(chunked) // MIB + 1}MiB")
    change = cheapest_changes(recipe, "l4", budget=budget).fitting[0]
    assert change.overrides == ("loss.chunk_tokens=1024",)


def test_a_change_between_the_needed_ones_is_left_out(recipe, few_bytes):
    few_bytes({"loss.chunk_tokens=1024": 10, "checkpointing.mode=full": 10}, device=80)
    change = cheapest_changes(recipe, "l4").fitting[0]
    assert change.overrides == ("loss.chunk_tokens=1024", "checkpointing.mode=full")
