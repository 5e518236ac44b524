"""Packed rows are timed with the documents that the recipe says, in the memory of whatever number needs most."""

from __future__ import annotations

import pytest

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.estimator.estimate import SharedTraces
from lowmem_ft.recipe import load_recipe

GPU = "rtx-4090"
LONG = ("data.packing=true", "data.max_length=256", "data.eval_size=null", "training.eval_steps=null")


def recipe_of(number, *settings):
    own = () if number is None else (f"data.documents_per_row={number}",)
    return load_recipe("tiny", [*LONG, "training.gradient_accumulation_steps=1", *own, *settings])


@pytest.fixture(scope="module")
def estimates():
    return {number: estimate_memory(recipe_of(number), GPU) for number in (None, 1, 4, 16)}


def test_the_answer_says_what_it_assumed(estimates):
    def said(number):
        return [choice for choice in estimates[number].choices if choice.startswith("packed rows")]

    assert said(None) == [
        "packed rows: timed as 4 documents of 64 tokens, which data.documents_per_row=N changes"
    ]
    assert said(1) == ["packed rows: timed as one document"]
    assert said(16) == ["packed rows: timed as 16 documents of 16 tokens"]
    whole = estimate_memory(load_recipe("tiny", ["data.max_length=256"]), GPU)
    assert not [choice for choice in whole.choices if choice.startswith("packed rows")]


def test_memory_is_that_of_rows_of_several_documents_which_need_a_mask(estimates):
    several = estimates[None]
    for estimate in estimates.values():
        assert estimate.allocated_peak_bytes == several.allocated_peak_bytes
        assert estimate.process_peak_bytes == several.process_peak_bytes


def test_one_document_takes_the_seconds_of_its_own_kernels(estimates):
    assert estimates[1].step != estimates[None].step
    assert estimates[4].step == estimates[None].step


def test_tables_of_gpus_answer_as_an_estimate_of_one_does(estimates):
    found = SharedTraces(recipe_of(1)).estimate(find_gpu(GPU))
    assert found.allocated_peak_bytes == estimates[1].allocated_peak_bytes
    assert found.step == estimates[1].step
