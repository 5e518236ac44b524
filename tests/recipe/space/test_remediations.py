"""What to change in a recipe that needs too much, the cheapest first."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from sweeps import few_quick

from lowmem_ft.foundation.knob import Effect
from lowmem_ft.recipe import Recipe, check_recipe, load_recipe
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.rules.engine_rules import problems_with_processes
from lowmem_ft.recipe.rules.rule import reads
from lowmem_ft.recipe.space import search_space
from lowmem_ft.recipe.space.remediations import Remediation, remediations_for

RECIPES = sorted(path.stem for path in (Path(__file__).parents[3] / "recipes").glob("*.yaml"))
GREEDY = [
    "model=any",
    "loss.chunk_tokens=null",
    "training.per_device_train_batch_size=4",
    "training.gradient_accumulation_steps=2",
    "data.max_length=4096",
]
HAND_MADE = {
    "defaults": ["model=any"],
    "greedy": GREEDY,
    "bitsandbytes": [*GREEDY, "optimizer.name=adamw_bnb_8bit"],
    "bitsandbytes-bfloat16": ["model=any", "optimizer.name=paged_lion_32bit", "model.dtype=bfloat16"],
    "adafactor": [*GREEDY, "optimizer.name=adafactor"],
    "plain-sgd": [*GREEDY, "optimizer.name=sgd", "optimizer.momentum=0"],
    "loss-scaler": [*GREEDY, "training.mixed_precision=fp16"],
    "loss-scaler-unclipped": [
        "model=any",
        "training.mixed_precision=fp16",
        "training.max_grad_norm=null",
        "training.gradient_accumulation_steps=4",
    ],
    "the-checkpoints-own-type": ["model=any", "model.dtype=auto", "optimizer.master=split24"],
    "float16-checkpoint": ["model=any", "model.dtype=float16"],
    "some-layers": ["model=any", "checkpointing.mode=selective", "checkpointing.every_n_layers=3"],
    "in-backward": ["model=any", "optimizer.in_backward=true", "training.per_device_train_batch_size=4"],
    "some-resident": [
        "model=any",
        "checkpointing.mode=full",
        "optimizer.in_backward=true",
        "offload.optimizer=host",
        "offload.parameters=stream",
        "offload.resident_layers=3",
    ],
    "lora": [*GREEDY, "adapter.name=lora"],
    "lora-loss-scaler": ["model=any", "adapter.name=lora", "training.mixed_precision=fp16"],
    "int8": ["model=any", "adapter.name=lora", "model.quantization=int8"],
    "gguf": ["model=any.gguf"],
}

QUICK = ("8b-8gb", "7b-qlora-t4", "8b-fsdp2", *HAND_MADE)
"""Of the shipped recipes, those with the most techniques, without bfloat16 and for several GPUs."""

each_recipe = pytest.mark.parametrize("recipe", few_quick([*RECIPES, *HAND_MADE], QUICK))


def loaded(name: str, *overrides: str) -> Recipe:
    if name in HAND_MADE:
        return load_recipe(None, [*HAND_MADE[name], *overrides])
    return load_recipe(name, overrides)


def overrides(*settings: str) -> list[str]:
    return [way.overrides_text for way in remediations_for(load_recipe(None, list(settings)))]


def test_they_go_from_no_cost_to_other_mathematics():
    assert overrides(*GREEDY) == [
        "loss.chunk_tokens=1024",
        "training.per_device_train_batch_size=1 training.gradient_accumulation_steps=8",
        "training.mixed_precision=bf16",
        "training.mixed_precision=no model.dtype=bfloat16 optimizer.master=split16",
        "checkpointing.mlp_activation=recompute",
        "checkpointing.mode=full",
        "tiling.mlp=4",
        "loss.chunk_tokens=1024 tiling.head=8",
        "checkpointing.mode=full accumulation.order=vertical optimizer.in_backward=true",
        "optimizer.state=8bit",
        "training.mixed_precision=no model.dtype=bfloat16 optimizer.master=split24",
        "offload.optimizer=host",
        "checkpointing.mode=full offload.activations=inputs",
        "offload.optimizer=host checkpointing.mode=full accumulation.order=vertical optimizer.in_backward=true "
        "offload.parameters=stream",
        "optimizer.master=fp32 training.mixed_precision=bf16 model.dtype=bfloat16 adapter.name=lora",
        "optimizer.master=fp32 training.mixed_precision=bf16 model.dtype=bfloat16 adapter.name=lora "
        "model.quantization=nf4",
        "data.max_length=2048",
    ]


@each_recipe
def test_each_gives_a_recipe_that_works_alone_and_after_those_before_it(recipe):
    plain = together = loaded(recipe)
    for way in remediations_for(plain):
        check_recipe(way.applied_to(plain))
        together = way.applied_to(together)
        check_recipe(together)


@each_recipe
def test_each_can_be_typed_and_changes_something(recipe):
    plain = loaded(recipe)
    for way in remediations_for(plain):
        assert way.applied_to(plain) == loaded(recipe, *way.overrides) != plain


@each_recipe
def test_what_has_been_done_is_not_suggested_again(recipe):
    lean = loaded(recipe)
    done: set[str] = set()
    for way in remediations_for(lean):
        lean = way.applied_to(lean)
        done |= set(way.settings)
    again = {key for way in remediations_for(lean) for key in way.settings}
    assert again & done <= {"data.max_length"}


def test_state_in_several_formats_is_offered_what_needs_less_than_it():
    mixed = loaded("1b-bf16", "optimizer.state={exp_avg: bf16, exp_avg_sq: 8bit}")
    offered = {change.settings.get("optimizer.state") for change in remediations_for(mixed)}
    assert offered & {"fp32", "bf16", "8bit"} == {"8bit"}


@each_recipe
def test_16_bits_of_a_trained_weight_never_come_without_the_others(recipe):
    plain = loaded(recipe)
    for way in remediations_for(plain):
        changed = way.applied_to(plain)
        if "model.dtype" in way.settings and changed.adapter.name == "none":
            assert changed.optimizer.master in ("split16", "split24")


@pytest.mark.parametrize("recipe", ["loss-scaler", "loss-scaler-unclipped", "lora-loss-scaler"])
def test_whoever_scales_the_loss_is_not_told_to_use_bfloat16(recipe):
    texts = [way.overrides_text for way in remediations_for(loaded(recipe))]
    assert texts
    assert not any("bf16" in text or "bfloat16" in text for text in texts)


@each_recipe
def test_a_device_without_bfloat16_is_told_of_float16_and_of_nothing_that_it_cannot_do(recipe):
    plain = together = loaded(recipe)
    if "bf16" in plain.training.mixed_precision or plain.model.dtype in ("bfloat16", "auto", "float16"):
        return  # refused there as it is
    for way in remediations_for(plain, has_bfloat16=False):
        assert not {"bf16", "bfloat16", "split16", "split24"} & {*map(str, way.settings.values())}
        check_recipe(way.applied_to(plain))
        together = way.applied_to(together)
        check_recipe(together)


def test_a_device_without_bfloat16_gets_float16_beside_adapters_and_float32_where_layers_are_streamed():
    def told(*settings):
        recipe = load_recipe(None, ["model=any", *settings])
        return [way.overrides_text for way in remediations_for(recipe, has_bfloat16=False)]

    assert "training.mixed_precision=fp16 model.dtype=float16" in told("adapter.name=lora")
    assert "model.dtype=float16" in told("adapter.name=lora", "training.mixed_precision=fp16")
    trained = told()
    assert "training.mixed_precision=fp16" in trained
    lora = "training.mixed_precision=fp16 model.dtype=float16 adapter.name=lora"
    assert lora in trained
    (streamed,) = [text for text in trained if "offload.parameters=stream" in text]
    assert "training.mixed_precision=no" in streamed
    unclipped = told("training.max_grad_norm=null", "optimizer.in_backward=true")
    assert "training.mixed_precision=fp16" not in unclipped


def test_a_knob_that_states_leaner_values_and_their_effect_is_offered(monkeypatch):
    key = recipe_keys()["training.logging_steps"]
    states = {
        "effects": Effect(cost="time"),
        "off": 10,
        "search_values": (10, 20),
        "frees": "half of the lines",
    }
    monkeypatch.setitem(recipe_keys(), key.path, dataclasses.replace(key, **states))
    (way,) = [way for way in remediations_for(load_recipe(None, ["model=any"])) if key.path in way.settings]
    assert (way.overrides_text, way.why) == ("training.logging_steps=20", "half of the lines")


def test_a_change_brings_along_what_a_rule_asks_for_that_is_written_once(monkeypatch):
    @reads("tiling.head", "checkpointing.mode")
    def tiles_need_recomputation(recipe):
        if recipe.tiling.head > 1 and recipe.checkpointing.mode != "full":
            yield "tiling.head needs checkpointing.mode=full."

    assert "tiling.head=8" in overrides("model=any")
    monkeypatch.setattr(search_space, "CONFLICTS", (*search_space.CONFLICTS, tiles_need_recomputation))
    texts = overrides("model=any")
    assert "checkpointing.mode=full tiling.head=8" in texts
    assert "tiling.head=8" not in texts


def test_float32_masters_of_bfloat16_weights_lose_the_half_that_is_there_twice():
    assert "optimizer.master=split16" in overrides("model=any", "model.dtype=bfloat16")


def test_gradients_of_several_micro_batches_are_summed_inside_products():
    trained = ("model=any", "model.dtype=bfloat16", "optimizer.master=split16")
    several = overrides(*trained, "training.gradient_accumulation_steps=4")
    assert "accumulation.fusion=true" in several
    for texts in (overrides(*trained), overrides("model=any", "training.gradient_accumulation_steps=4")):
        assert not any("fusion=true" in text for text in texts)


def test_frozen_weights_lose_their_lower_bits_and_the_optimizer_is_left_alone():
    texts = overrides("model=any", "adapter.name=lora", "training.mixed_precision=bf16")
    assert "model.dtype=bfloat16" in texts
    assert "offload.parameters=stream" in texts
    assert not any("optimizer" in text for text in texts)


def test_8_bit_optimizers_of_others_become_ours_of_the_same_size():
    texts = overrides("model=any", "optimizer.name=lion_8bit")
    assert "optimizer.name=lion optimizer.state=8bit offload.optimizer=host" in texts


def test_checkpointing_in_part_can_become_checkpointing_in_full():
    texts = overrides("model=any", "checkpointing.mode=selective", "checkpointing.skip_last_layers=2")
    assert "checkpointing.skip_last_layers=0" in texts
    assert "checkpointing.mode=full" in texts


def test_layers_that_stay_can_be_streamed():
    assert "offload.resident_layers=0" in overrides(*HAND_MADE["some-resident"])


def test_mlps_are_worked_on_in_pieces_where_rows_are_long():
    assert "tiling.mlp=4" in overrides("model=any", "data.max_length=8192")
    assert "tiling.mlp=4" not in overrides("model=any", "data.max_length=512")


def test_rows_are_not_suggested_below_the_shortest_length():
    assert "data.max_length=512" in overrides("model=any", "data.max_length=600")
    assert not any("max_length" in text for text in overrides("model=any", "data.max_length=512"))


def test_a_change_leaves_the_rest_of_the_recipe_alone():
    recipe = load_recipe(None, GREEDY)
    changed = Remediation(settings={"training.seed": 7}, why="").applied_to(recipe)
    assert (changed.training.seed, recipe.training.seed) == (7, 42)
    assert changed.data == recipe.data


def test_a_change_is_as_dear_as_what_it_brings_along():
    """A smaller micro-batch costs nothing, but here it needs vertical order, and that a second forward pass."""
    texts = overrides(*HAND_MADE["in-backward"])
    (smaller,) = [text for text in texts if "per_device_train_batch_size" in text]
    assert "checkpointing.mode=full" in smaller
    assert texts.index("training.mixed_precision=bf16") < texts.index(smaller)


def test_what_a_recipe_has_given_up_already_is_not_given_up_again():
    """An optimizer with other mathematics becomes another one, which lacks no more of AdamW's."""
    recipe = load_recipe(None, ["model=any", "optimizer.name=lion_8bit"])
    (way,) = [way for way in remediations_for(recipe) if way.settings.get("offload.optimizer") == "host"][:1]
    assert way.settings["optimizer.name"] == "lion"
    assert way.keeps_mathematics_of(recipe)


# --- several processes ------------------------------------------------------------------------------------------------


@each_recipe
def test_several_processes_are_told_nothing_that_works_in_one_only(recipe):
    plain = loaded(recipe)

    def problems(changed):
        return set(problems_with_processes(changed, 2))

    several = [way.applied_to(plain) for way in remediations_for(plain, num_processes=2)]
    for changed in (way.applied_to(plain) for way in remediations_for(plain)):
        assert (changed in several) == (problems(changed) <= problems(plain))


def test_what_several_processes_are_told():
    settings = [
        "model=any",
        "training.per_device_train_batch_size=4",
        "training.gradient_accumulation_steps=1",
    ]
    recipe = load_recipe(None, settings)
    one = {key for way in remediations_for(recipe) for key in way.settings}
    several = {key for way in remediations_for(recipe, num_processes=2) for key in way.settings}
    assert one - several == {
        "optimizer.in_backward",
        "accumulation.order",
        "offload.parameters",
    }
    assert {"optimizer.master", "offload.optimizer"} <= several


def test_bfloat16_weights_are_told_to_several_processes_that_accumulate():
    recipe = load_recipe(None, ["model=any", "training.gradient_accumulation_steps=4"])
    ways = remediations_for(recipe, num_processes=2)
    masters = [way.settings["optimizer.master"] for way in ways if "optimizer.master" in way.settings]
    assert masters[:2] == ["split16", "split24"]
