from __future__ import annotations

import dataclasses

import pytest
from transformers import LlamaConfig

from lowmem_ft.budget import Budget
from lowmem_ft.catalog.gpu import Gpu
from lowmem_ft.catalog.gpus import load_gpus
from lowmem_ft.estimator import estimate_memory
from lowmem_ft.estimator.changes import Change, cheapest_changes
from lowmem_ft.memory.estimate import MemoryEstimate
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.training.ways_out import ways_out_of
from lowmem_ft.units import MIB

LEAN = [
    "loss.chunk_tokens=64",
    "checkpointing.mode=full",
    "optimizer.name=paged_adamw_8bit",
    "data.max_length=512",
    "model.dtype=bfloat16",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=1,
        num_attention_heads=8,
        vocab_size=8192,
        max_position_embeddings=1024,
    ).save_pretrained(path)
    return str(path)


@pytest.fixture
def recipe(folder) -> Recipe:
    return make_recipe(folder, "training.per_device_train_batch_size=4", "loss.chunk_tokens=null")


def make_recipe(folder: str, *settings: str) -> Recipe:
    return load_recipe(None, [f"model={folder}", "model.weights=random", "data.max_length=1024", *settings])


def make_gpu(memory_bytes: int, like: str = "l4") -> Gpu:
    return dataclasses.replace(load_gpus()[like], memory_bytes=memory_bytes)


def needs(recipe: Recipe) -> int:
    return estimate_memory(recipe, "l4").process_peak_bytes


def applied(recipe: Recipe, overrides: tuple[str, ...]) -> Recipe:
    for way in ways_out_of(recipe):
        if set(way.overrides) <= set(overrides):
            recipe = way.applied_to(recipe)
    return recipe


def dearest(recipe: Recipe, change: Change) -> int:
    """The place of the dearest change in it, in the order of costs."""
    return max(
        index for index, way in enumerate(ways_out_of(recipe)) if set(way.overrides) <= set(change.overrides)
    )


def test_single_changes_that_fit_come_first_and_really_fit(recipe):
    chunked = applied(recipe, ("loss.chunk_tokens=1024",))
    gpu = make_gpu(needs(chunked) + MIB)
    assert not estimate_memory(recipe, gpu).fits
    changes = cheapest_changes(recipe, gpu).fitting
    assert len(changes) == 3
    assert changes[0].overrides == ("loss.chunk_tokens=1024",)
    order = [dearest(recipe, change) for change in changes]
    assert order == sorted(set(order))
    for change in changes:
        again = estimate_memory(applied(recipe, change.overrides), gpu)
        assert again.fits
        assert again.process_peak_bytes == change.estimate.process_peak_bytes


def test_changes_combine_where_one_is_not_enough_and_none_is_needless(recipe):
    ways = list(ways_out_of(recipe))
    # Less than the tensors of the best single change alone: no emptied cache makes room for them.
    singles = [estimate_memory(way.applied_to(recipe), "l4") for way in ways]
    least = min(single.allocated_peak_bytes for single in singles)
    gpu = dataclasses.replace(make_gpu(least - 1), context_bytes=0)
    change = cheapest_changes(recipe, gpu).fitting[0]
    used = [way for way in ways if set(way.overrides) <= set(change.overrides)]
    assert len(used) > 1
    assert estimate_memory(applied(recipe, change.overrides), gpu).fits
    for needless in used:
        rest = tuple(override for way in used if way is not needless for override in way.overrides)
        assert not estimate_memory(applied(recipe, rest), gpu).fits


def test_where_nothing_helps_nothing_is_offered_and_what_is_missing_is_known(recipe):
    changes = cheapest_changes(recipe, make_gpu(300 * MIB))
    assert changes.fitting == ()
    together = changes.all_together
    assert together is not None
    assert not together.estimate.fits
    keys = {key for way in ways_out_of(recipe) for key in way.settings}
    assert {override.partition("=")[0] for override in together.overrides} == keys


def test_what_the_gpu_cannot_run_is_not_offered(folder):
    recipe = make_recipe(folder, "loss.chunk_tokens=null")
    gpu = make_gpu(needs(recipe) - MIB, like="t4")
    changes = cheapest_changes(recipe, gpu).fitting
    assert changes
    for change in changes:
        assert not any("bf" in override for override in change.overrides)


def test_a_recipe_with_nothing_left_to_change_gets_no_offer(folder):
    changes = cheapest_changes(make_recipe(folder, *LEAN), make_gpu(100 * MIB))
    assert (changes.fitting, changes.all_together) == ((), None)


def test_a_budget_is_what_has_to_be_fitted(recipe):
    chunked = applied(recipe, ("loss.chunk_tokens=1024",))
    budget = Budget(device=f"{needs(chunked) // MIB + 1}MiB")
    change = cheapest_changes(recipe, "l4", budget=budget).fitting[0]
    assert change.overrides == ("loss.chunk_tokens=1024",)


def test_a_change_between_the_needed_ones_is_left_out(recipe, monkeypatch):
    """Chunks and checkpointing free 10 MiB each, nothing else does: what lies between them in cost is no help."""
    plain = estimate_memory(recipe, "l4")

    def estimated(changed: Recipe, gpu, *, budget) -> MemoryEstimate:
        helps = (changed.loss.chunk_tokens is not None) + (changed.checkpointing.mode == "full")
        return dataclasses.replace(plain, fits=helps == 2)

    monkeypatch.setattr("lowmem_ft.estimator.changes.estimate_memory", estimated)
    (change,) = cheapest_changes(recipe, "l4").fitting
    assert change.overrides == ("loss.chunk_tokens=1024", "checkpointing.mode=full")
