from __future__ import annotations

import pytest
from transformers import BloomConfig, LlamaConfig

from lowmem_ft.data.row import IGNORED_LABEL
from lowmem_ft.foundation.errors import DataError, UserError
from lowmem_ft.planning.estimator.worst_batch import row_length, worst_batch
from lowmem_ft.recipe import Recipe, load_recipe

LIMIT_64 = LlamaConfig(max_position_embeddings=64)


def make_recipe(*settings: str) -> Recipe:
    return load_recipe(None, ["model=any", *settings])


def test_rows_are_as_long_as_the_recipe_says_or_else_as_the_model_takes():
    assert row_length(make_recipe("data.max_length=48"), LIMIT_64) == 48
    assert row_length(make_recipe("data.max_length=64"), LIMIT_64) == 64
    assert row_length(make_recipe("data.max_length=null"), LIMIT_64) == 64


def test_somebody_has_to_say_how_long_rows_are():
    assert row_length(make_recipe("data.max_length=99"), BloomConfig()) == 99
    with pytest.raises(DataError, match=r"Set data.max_length\."):
        row_length(make_recipe("data.max_length=null"), BloomConfig())


def test_every_row_is_full_and_every_token_but_the_first_is_learnt():
    batch = worst_batch(make_recipe("data.max_length=32"), LIMIT_64, 3, attn_implementation="sdpa")
    assert batch.input_ids_BT.shape == (3, 32)
    assert batch.num_tokens == 3 * 32
    assert batch.num_label_tokens == 3 * 31
    assert (batch.labels_BT[:, 0] == IGNORED_LABEL).all()


@pytest.mark.parametrize("attention,shape", [("sdpa", (2, 32)), ("flash_attention_2", (1, 64))])
def test_packed_rows_hold_several_documents(attention, shape):
    recipe = make_recipe("data.max_length=32", "data.packing=true")
    batch = worst_batch(recipe, LIMIT_64, 2, attn_implementation=attention)
    assert batch.input_ids_BT.shape == shape
    assert batch.num_tokens == 64
    assert batch.position_ids_BT is not None
    assert (batch.position_ids_BT == 0).sum() == 2 * 4


@pytest.mark.parametrize("number", [1, 2, 32])
def test_a_recipe_says_how_many_documents_packed_rows_hold(number):
    recipe = make_recipe("data.max_length=32", "data.packing=true", f"data.documents_per_row={number}")
    batch = worst_batch(recipe, LIMIT_64, 2, attn_implementation="sdpa")
    assert batch.position_ids_BT is not None
    assert (batch.position_ids_BT == 0).sum() == 2 * number


@pytest.mark.parametrize(
    "settings, words",
    [
        (["data.packing=true", "data.documents_per_row=0"], "data.documents_per_row is at least 1, got 0"),
        (["data.documents_per_row=2"], "Set data.packing=true, or leave it out"),
    ],
)
def test_documents_of_rows_that_hold_none_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        make_recipe(*settings)


def test_a_packed_row_shorter_than_its_documents_are_many_is_possible():
    recipe = make_recipe("data.max_length=3", "data.packing=true")
    assert worst_batch(recipe, LIMIT_64, 1, attn_implementation="sdpa").num_tokens == 3
