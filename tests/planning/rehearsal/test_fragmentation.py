"""Rows of several lengths leave memory in the allocator's cache that the next length cannot use: a rehearsal has it."""

from __future__ import annotations

import dataclasses
import functools
import io

import pytest
from rich.console import Console

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.rehearsal import Rehearsal
from lowmem_ft.reports.rehearsal_table import rehearsal_table

LARGE = (  # activations beyond the allocator's small pool
    *("training.per_device_train_batch_size=64", "training.gradient_accumulation_steps=1"),
    *("data.loss_on=all", "data.eval_size=null", "training.eval_steps=null", "training.num_train_epochs=1"),
    *("loss.chunk_tokens=null", "checkpointing.mode=none", "data.shuffle=false"),
)
LENGTHS = (5, 20, 30, 40)
"""In words."""
FIXED = "expandable_segments:False"


@pytest.fixture(scope="module")
def rehearsed(rehearse, recipe_in, chats_in, tmp_path_factory):
    """A function that rehearses a batch of each of these lengths, in turn, and estimates the longest alone."""

    @functools.cache
    def make(lengths: tuple[int, ...], allocator: str | None) -> tuple[Rehearsal, MemoryEstimate]:
        folder = tmp_path_factory.mktemp("rehearsed")
        wanted = recipe_in(
            folder, *LARGE, f"data={chats_in(folder, [words for words in lengths for _ in range(64)])}"
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
            patch.delenv("PYTORCH_ALLOC_CONF", raising=False)
            if allocator is not None:
                patch.setenv("PYTORCH_ALLOC_CONF", allocator)
            found = rehearse(wanted, "rtx-4090")
            data = dataclasses.replace(wanted.data, max_length=found.longest.shape.length)
            estimate = estimate_memory(dataclasses.replace(wanted, data=data), "rtx-4090")
        assert len(found.steps) == len(lengths)
        return found, estimate

    return make


def test_segments_of_a_fixed_size_hold_more_than_the_longest_rows_need(rehearsed):
    found, longest = rehearsed(LENGTHS, FIXED)
    assert found.estimate.reserved_peak_bytes > 1.15 * longest.reserved_peak_bytes  # 1.2 with torch 2.14
    largest = max((step.shape for step in found.steps), key=lambda shape: shape.tokens)
    assert largest == found.longest.shape
    assert any(said.startswith(f"batch: at most {largest}") for said in found.estimate.choices)
    alone, estimate = rehearsed((max(LENGTHS),), FIXED)
    assert alone.estimate.reserved_peak_bytes == estimate.reserved_peak_bytes == longest.reserved_peak_bytes


@pytest.mark.parametrize(
    "allocator",
    [
        pytest.param("expandable_segments:True", id="asked for", marks=pytest.mark.slow),
        pytest.param(None, id="as runs set it"),
    ],
)
def test_segments_that_grow_serve_all_lengths_with_what_the_longest_needs(rehearsed, allocator):
    found, longest = rehearsed(LENGTHS, allocator)
    assert found.estimate.reserved_peak_bytes == longest.reserved_peak_bytes


def test_it_is_printed_and_a_card_without_room_for_it_is_told(rehearse, rehearsed, monkeypatch):
    found, longest = rehearsed(LENGTHS, FIXED)
    held = format_bytes(found.estimate.reserved_peak_bytes)
    assert f" in tensors, {held} reserved for them, " in printed(found)
    assert "empty its cache" not in printed(found)
    needs = found.estimate.process_peak_bytes
    spare = (found.estimate.reserved_peak_bytes - longest.reserved_peak_bytes) // 2
    small = dataclasses.replace(find_gpu("rtx-4090"), memory_bytes=needs - spare, held_by_others_bytes=0)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", FIXED)
    again = rehearse(found.recipe, small)
    assert "the allocator has to empty its cache 1 time" in printed(again)
    assert "expandable_segments:True needs less" in printed(again)


def test_waits_beyond_the_usual_one_say_what_to_do(rehearse, small, chats):
    # The last step waits for more: the weights that it leaves are looked at.
    found = rehearse(small(f"data={chats([5] * 64)}", "training.max_steps=2"), "rtx-4090")
    assert sum(found.longest.waits.values()) == 1
    assert ".item()" not in printed(found)
    waiting = dataclasses.replace(found.longest, waits={"train.py:3": 5})
    steps = tuple(waiting if step.is_exact else step for step in found.steps)
    assert ".item()" in printed(dataclasses.replace(found, steps=steps))


def printed(found: Rehearsal) -> str:
    """What a rehearsal prints, as one line."""
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as said:
        console.print(rehearsal_table(found))
    return " ".join(said.get().split())
