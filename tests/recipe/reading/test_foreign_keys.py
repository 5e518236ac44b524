"""Keys of other toolkits are answered with ours, or with what to do instead."""

from __future__ import annotations

import pytest

from lowmem_ft.foundation.errors import RecipeError
from lowmem_ft.recipe import load_recipe
from lowmem_ft.recipe.reading.foreign_keys import FOREIGN_KEYS, KEYS_OF
from lowmem_ft.recipe.reading.keys import recipe_groups, recipe_keys

AXOLOTL = """
base_model: some/model
load_in_4bit: true
load_in_8bit: false
adapter: qlora
lora_r: 32
optimizer: adamw_8bit
wandb_watch:
special_tokens: {pad_token: "<pad>"}
fsdp_config: {offload_params: true, state_dict_type: FULL}
"""


def problems_of(recipe, *settings) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, settings)
    return caught.value.problems


def test_a_config_of_another_toolkit_is_answered_key_by_key(tmp_path):
    file = tmp_path / "axolotl.yml"
    file.write_text(AXOLOTL, encoding="utf-8")
    problems = [problem.removeprefix(f"{file}: ") for problem in problems_of(file)]
    expected = {
        "base_model": "write `model.name_or_path=some/model`",
        "load_in_4bit": "For true, write `model.quantization=nf4`",
        "load_in_8bit": "For false, leave it out",
        "adapter": "For qlora, write `adapter.name=lora model.quantization=nf4`",
        "lora_r": "write `adapter.r=32`",
        "optimizer": "write `optimizer.name=adamw_bnb_8bit`",
        "wandb_watch": "Without a value, leave it out",
        "special_tokens.pad_token": "model.tokenizer_name_or_path",
        "fsdp_config": "`distributed.strategy`",
    }
    for key, answer in expected.items():
        (problem,) = [problem for problem in problems if problem.startswith(f"{key} is a key of axolotl")]
        assert answer in problem


@pytest.mark.parametrize(
    "setting, answer",
    [
        ("sequence_len=4096", "`data.max_length=4096`"),
        ("tokenizer.max_seq_len=512", "`data.max_length=512`"),
        ("training.finetuning_type=lora", "`adapter.name=lora`"),
        ("adapter.trainable_token_indices=[512]", "in a recipe it is `adapter.train_new_tokens`"),
        ("--neftune_noise_alpha 5", "hf.attach"),
        ("--lora_r 8", "Write adapter.r=8."),
        ("template=qwen3", "Leave it out: the model's own chat template is used"),
        ("use_gradient_checkpointing=unsloth", "checkpointing.mode=full offload.activations=inputs"),
    ],
)
def test_a_foreign_setting_of_the_command_line_is_answered(setting, answer):
    (problem,) = problems_of("tiny", setting)
    assert answer in problem


def test_a_name_of_ours_in_the_wrong_group_is_theirs_only_with_a_value_of_theirs():
    (theirs,) = problems_of("tiny", "device=cuda")
    assert "torchtune" in theirs
    assert "leave it out" in theirs
    (ours,) = problems_of("tiny", "device=24GiB")
    assert "`budget.device`" in ours
    assert "torchtune" not in ours
    (misspelt,) = problems_of("tiny", "optimizer.nam=adamw")
    assert "`optimizer.name`" in misspelt


def _settings():
    for entry in FOREIGN_KEYS.values():
        for setting in entry.values.values():
            yield from setting.split()


def test_every_entry_leads_to_a_key_that_exists_and_every_setting_is_accepted():
    assert {entry.ours for entry in FOREIGN_KEYS.values() if entry.ours} <= set(recipe_keys())
    assert all(entry.note for entry in FOREIGN_KEYS.values() if entry.ours is None)
    rejected = {}
    for setting in sorted(set(_settings())):
        try:
            load_recipe("tiny", [setting])
        except RecipeError as error:
            rejected[setting] = [problem for problem in error.problems if "must be" in problem]
    assert not any(rejected.values()), rejected


def test_the_toolkits_names_and_the_entries_are_the_same_and_hide_none_of_ours():
    assert {name for names in KEYS_OF.values() for name in names} == set(FOREIGN_KEYS)
    ours = {key.name for key in recipe_keys().values()}
    assert ours & set(FOREIGN_KEYS) == {"device", "optimizer"}
    assert {"adapter", "optimizer", "loss"} == set(recipe_groups()) & set(FOREIGN_KEYS)
