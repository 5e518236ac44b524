"""How layers repeat, and which shallow model stands for a deep one."""

from __future__ import annotations

import torch
from torch import nn
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig

from lowmem_ft.models.config import ModelConfig
from lowmem_ft.planning.estimator.runtime import model_on_meta
from lowmem_ft.planning.estimator.traces.repeated_layers import stand_ins, with_num_layers
from lowmem_ft.recipe import load_recipe

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 128}


def llama(num_layers: int) -> LlamaConfig:
    return LlamaConfig(**SIZES, num_hidden_layers=num_layers)


def gemma(num_layers: int) -> Gemma3TextConfig:
    return Gemma3TextConfig(**SIZES, num_hidden_layers=num_layers, num_key_value_heads=2, head_dim=16)


def shallow(config, *settings: str):
    recipe = load_recipe(None, ["model=any", *settings])
    return next(iter(stand_ins(recipe, model_on_meta(ModelConfig(name_or_path="any"), config))), None)


def test_a_model_of_equal_layers_repeats_from_the_first_with_period_one():
    found = shallow(llama(32))
    assert found is not None
    assert (found.layers.stack, found.layers.lead, found.layers.period) == ("model.layers", 0, 1)
    assert found.more == (32 - found.num_layers,)
    assert found.num_layers < 16


def test_alternating_layers_repeat_with_the_period_of_the_pattern():
    found = shallow(gemma(60))
    assert found is not None
    assert found.layers.period == 6
    assert found.num_layers + 6 * sum(found.more) == 60


def test_a_shallow_model_is_traced_whole():
    assert shallow(llama(4)) is None
    assert shallow(gemma(20)) is None


def test_what_the_recipe_says_in_layers_is_a_period_and_a_margin():
    plain = shallow(llama(48))
    found = shallow(llama(48), "checkpointing.mode=full", "checkpointing.every_n_layers=4")
    assert plain is not None
    assert found is not None
    assert found.layers.period % 4 == 0
    assert found.num_layers >= plain.num_layers + 4


def test_the_last_layers_that_are_not_checkpointed_repeat_by_themselves():
    found, other = (
        shallow(llama(48), "checkpointing.mode=full", f"checkpointing.skip_last_layers={n}") for n in (12, 24)
    )
    assert found is not None
    assert other is not None
    assert (found.layers, found.num_layers) == (other.layers, other.num_layers)
    assert found.num_layers <= 10
    recipe = found.recipe(load_recipe(None, ["model=any", "checkpointing.mode=full"]))
    assert (recipe.checkpointing.skip_last_layers,) == tuple(dict(found.last).values()) < (12,)


def test_alternating_layers_in_two_stretches_are_first_tried_with_edges_shorter_than_a_period():
    model = model_on_meta(ModelConfig(name_or_path="any"), gemma(120))
    plain, half = (
        load_recipe(None, ["model=any", "checkpointing.mode=full", f"checkpointing.skip_last_layers={n}"])
        for n in (0, 60)
    )
    small, usual = stand_ins(half, model)
    assert small.num_layers < usual.num_layers
    assert (small.layers.edge, usual.layers.edge) == (2, None)
    for one in (small, usual):
        assert one.num_layers + 6 * sum(one.more) == 120
        assert one.layers.pivots[1] + 6 <= one.num_layers - 2
    usual, deeper = stand_ins(plain, model)
    assert usual.layers.edge is None
    assert deeper == usual.deeper()


STREAMED = ("adapter.name=lora", "checkpointing.mode=full", "offload.parameters=stream")


def test_layers_that_stay_on_the_device_repeat_by_themselves_and_any_number_has_the_same_stand_in():
    found, other = (shallow(llama(48), *STREAMED, f"offload.resident_layers={n}") for n in (20, 30))
    assert found is not None
    assert other is not None
    assert (found.layers, found.num_layers, found.last) == (other.layers, other.num_layers, other.last)
    (tail,), ((key, num_last),) = found.layers.tails, found.last
    assert key == "offload.resident_layers"
    assert found.more == (28 - tail, 20 - num_last)
    assert other.more == (18 - tail, 30 - num_last)
    recipe = found.recipe(load_recipe(None, ["model=any", *STREAMED, "offload.resident_layers=20"]))
    assert recipe.offload.resident_layers == num_last < 20


def test_layers_that_stay_and_those_of_them_that_are_not_checkpointed_repeat_each_by_themselves():
    def stand_in(resident: int, skipped: int):
        settings = (f"offload.resident_layers={resident}", f"checkpointing.skip_last_layers={skipped}")
        return shallow(llama(48), *STREAMED, *settings)

    found, other = stand_in(30, 16), stand_in(34, 12)
    assert found is not None
    assert other is not None
    assert (found.layers, found.num_layers, found.last) == (other.layers, other.num_layers, other.last)
    first, last = found.layers.tails
    assert found.layers.period == 1
    assert dict(found.last) == {
        "offload.resident_layers": found.num_layers - first,
        "checkpointing.skip_last_layers": found.num_layers - last,
    }
    assert found.more == (18 - first, 14 - (last - first), 16 - (found.num_layers - last))
    longer = found.longer()
    assert longer.num_layers == found.num_layers + 3
    assert dict(longer.last) == {
        "offload.resident_layers": found.num_layers - first + 2,
        "checkpointing.skip_last_layers": found.num_layers - last + 1,
    }
    one_streamed, few_skipped = stand_in(47, 20), stand_in(30, 2)
    assert one_streamed is not None
    assert few_skipped is not None
    assert (one_streamed.layers.lead, len(one_streamed.more)) == (1, 2)
    assert (len(few_skipped.more), [key for key, _ in few_skipped.last]) == (2, ["offload.resident_layers"])


def test_few_that_stay_and_few_that_are_streamed_stand_in_the_stand_in():
    few_stay, few_streamed = (shallow(llama(48), *STREAMED, f"offload.resident_layers={n}") for n in (2, 46))
    assert few_stay is not None
    assert few_streamed is not None
    assert (few_stay.layers.tails, few_stay.last, len(few_stay.more)) == ((), (), 1)
    assert (few_streamed.layers.lead, few_streamed.layers.tails, len(few_streamed.more)) == (2, (), 1)
    assert [key for key, _ in few_streamed.last] == ["offload.resident_layers"]


def test_an_odd_layer_in_front_is_the_lead():
    model = model_on_meta(ModelConfig(name_or_path="any"), llama(32))
    layers = model.get_submodule("model.layers")
    assert isinstance(layers, nn.ModuleList)
    layers[0].get_submodule("mlp").register_parameter("odd", nn.Parameter(torch.empty(3, device="meta")))
    found, *_ = stand_ins(load_recipe(None, ["model=any"]), model)
    assert (found.layers.lead, found.layers.period) == (1, 1)


def test_a_model_without_a_stack_of_layers_is_traced_whole():
    assert stand_ins(load_recipe(None, ["model=any"]), nn.Linear(2, 2)) == []


def test_a_config_with_fewer_layers_is_cut_everywhere_and_the_original_is_left_alone():
    full = gemma(12)
    cut = with_num_layers(full, 6)
    assert (cut.num_hidden_layers, len(cut.layer_types)) == (6, 6)
    assert cut.layer_types == full.layer_types[:6]
    assert (full.num_hidden_layers, len(full.layer_types)) == (12, 12)
    assert with_num_layers(GPT2Config(n_layer=12), 5).n_layer == 5
