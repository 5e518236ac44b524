"""What to change in a recipe that needs too much, the cheapest first."""

from __future__ import annotations

from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.ways_out import SHORTEST_LENGTH, WayOut, ways_out_of

GREEDY = [
    "model=any",
    "loss.chunk_tokens=null",
    "training.per_device_train_batch_size=4",
    "training.gradient_accumulation_steps=2",
    "data.max_length=4096",
]
LEAN = [
    "model=any",
    "training.per_device_train_batch_size=1",
    "training.mixed_precision=bf16",
    "checkpointing.mode=full",
    "optimizer.name=paged_adamw_8bit",
    f"data.max_length={SHORTEST_LENGTH}",
    "model.dtype=bfloat16",
]


def overrides(*settings: str) -> list[str]:
    return [way.overrides_text for way in ways_out_of(load_recipe(None, list(settings)))]


def test_they_go_from_no_cost_to_the_loss_of_precision():
    assert overrides(*GREEDY) == [
        "loss.chunk_tokens=1024",
        "training.per_device_train_batch_size=1 training.gradient_accumulation_steps=8",
        "training.mixed_precision=bf16",
        "checkpointing.mode=full",
        "optimizer.name=adamw_bnb_8bit",
        "optimizer.name=paged_adamw_8bit",
        "data.max_length=2048",
        "model.dtype=bfloat16",
    ]


def test_what_has_been_done_is_not_suggested_again():
    assert overrides(*LEAN) == []


def test_checkpointing_in_part_can_become_checkpointing_in_full():
    assert "checkpointing.every_n_layers=1 checkpointing.skip_last_layers=0" in overrides(
        "model=any", "checkpointing.mode=full", "checkpointing.skip_last_layers=2"
    )


def test_rows_are_not_suggested_below_the_shortest_length():
    assert f"data.max_length={SHORTEST_LENGTH}" in overrides("model=any", "data.max_length=600")


def test_16_bit_weights_are_not_suggested_to_the_loss_scaler():
    assert "model.dtype=bfloat16" not in overrides("model=any", "training.mixed_precision=fp16")


def test_each_can_be_typed_and_gives_the_same_recipe():
    recipe = load_recipe(None, GREEDY)
    ways = list(ways_out_of(recipe))
    assert ways
    for way in ways:
        assert way.applied_to(recipe) == load_recipe(None, [*GREEDY, *way.overrides])


def test_a_change_leaves_the_rest_of_the_recipe_alone():
    recipe = load_recipe(None, GREEDY)
    changed = WayOut(settings={"training.seed": 7}, why="").applied_to(recipe)
    assert (changed.training.seed, recipe.training.seed) == (7, 42)
    assert changed.data == recipe.data
