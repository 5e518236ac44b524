from __future__ import annotations

import pytest

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu, split_count
from lowmem_ft.recipe import load_recipe
from lowmem_ft.recipe.shipped.needs import needs_of_shipped_recipes
from lowmem_ft.recipe.shipped.recipes_by_gpu import made_for


def settings_for(gpu: str, *words: str) -> list[str]:
    names = [word.removeprefix("recipe=") for word in words if word.startswith("recipe=")]
    recipe = load_recipe(*(names or [None]), [word for word in words if not word.startswith("recipe=")])
    return [" ".join(shipped.settings) for shipped in made_for(find_gpu(gpu), recipe)]


@pytest.mark.parametrize(
    "words, gpu, first",
    [
        (["recipe=1b-bf16"], "t4", "recipe=1b-fp16-t4"),
        (["recipe=1b-bf16"], "v100-16gb", "recipe=1b-fp16-t4"),
        (["model=llama-3.2-1b", "model.dtype=float32"], "t4", "recipe=1b-fp16-t4 model=llama-3.2-1b"),
        (["recipe=7b-lora"], "t4", "recipe=7b-qlora-t4"),
        (["recipe=7b-bf16"], "t4", "recipe=7b-qlora-t4"),  # none trains all of its weights there
        (["recipe=7b-bf16"], "rtx-4090", "recipe=8b-24gb model=Qwen/Qwen2.5-7B"),
        (["recipe=8b-bf16"], "rtx-3070", "recipe=8b-8gb"),
    ],
)
def test_the_recipe_of_a_card_for_a_model(words, gpu, first):
    assert settings_for(gpu, *words)[0] == first


def test_none_is_for_a_larger_card_or_types_that_the_card_has_not_or_a_model_of_another_size():
    assert not any("8b-24gb" in settings for settings in settings_for("rtx-3070", "recipe=8b-bf16"))
    assert settings_for("v100-32gb", "recipe=8b-bf16") == ["recipe=7b-qlora-t4 model=Qwen/Qwen3-8B-Base"]
    assert settings_for("h200", "recipe=tiny") == []
    assert settings_for("h200", "model=some/model-that-nobody-knows") == []


def test_every_recipe_is_for_its_own_card():
    for name, needs in needs_of_shipped_recipes().items():
        if needs.gpu != "cpu" and split_count(needs.gpu)[0] is None:
            assert f"recipe={name}" in settings_for(needs.gpu, f"recipe={name}")
