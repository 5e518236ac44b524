"""The longest batch of a trainer's data is in the steps of its estimate, or the estimate says that it may not be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lowmem_ft.planning.script_runs import estimate_script, longest_batch
from lowmem_ft.planning.script_runs.longest_batch import LongestBatchSearch
from lowmem_ft.planning.script_runs.script_estimate import LONGER_ROWS

TRAINER = """
    import sys

    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments
    )

    longest, *settings = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained("model")
    tokenizer.pad_token = tokenizer.eos_token
    lengths = [8 + number % 3 for number in range(100)]
    lengths[70] = int(longest)
    rows = Dataset.from_dict({"input_ids": [[1] * length for length in lengths]})
    if "stream" in settings:
        rows = rows.to_iterable_dataset()
    if "map" in settings:
        rows = Dataset.from_dict({"input_ids": [[1] * 8] * 600}).map(lambda row: row)
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=2, gradient_accumulation_steps=4, report_to="none", save_strategy="no",
        max_steps=3 if "three" in settings else 500, disable_tqdm=True,
    )
    Trainer(
        AutoModelForCausalLM.from_pretrained("model"), arguments, train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    ).train()
"""


@pytest.fixture
def estimated(script):
    """Estimates the script; returns its peak, what it says of the longest batch, and whether longer ones may come."""

    def estimate(*arguments: str) -> tuple[int, str, bool]:
        found = estimate_script(script(TRAINER), list(arguments), gpu="rtx-4090").estimate
        said = [line for line in found.choices if line.startswith("longest batch")]
        return found.allocated_peak_bytes, "".join(said), LONGER_ROWS in found.not_modelled

    return estimate


def test_the_longest_batch_is_in_the_steps_whenever_it_comes(estimated):
    usual, said, _ = estimated("10")
    assert said.startswith("longest batch: 20 tokens, ")
    peak, said, may_be_longer = estimated("120")
    assert said.startswith("longest batch: 240 tokens, ")
    assert "of all 50 batches of an epoch" in said
    assert not may_be_longer
    assert peak > usual + 240 * 512 * 4


def test_where_the_time_is_over_the_answer_says_how_far_it_came(estimated, monkeypatch):
    monkeypatch.setattr(longest_batch, "MOST_SECONDS", -1.0)
    _, said, may_be_longer = estimated("120")
    assert "of the first 1 of 50 batches" in said
    assert may_be_longer


@pytest.mark.parametrize("setting, is_looked_for", [("stream", False), ("map", True)])
def test_data_that_is_not_looked_through_to_its_end_may_have_longer_rows(estimated, setting, is_looked_for):
    _, said, may_be_longer = estimated("120", setting)
    assert may_be_longer
    assert bool(said) == is_looked_for


def pictures_and_text(rows: list[Any]) -> dict[str, torch.Tensor]:
    tokens, pixels = map(max, zip(*rows, strict=True))
    shape = len(rows), pixels
    return {"input_ids": torch.ones(len(rows), tokens, dtype=torch.long), "pixel_values": torch.ones(shape)}


def test_a_large_picture_counts_for_more_than_a_few_tokens():
    rows: Any = [(4, 9), (9, 9), (5, 900), (4, 9), (4, 9), (4, 9)]
    loader = DataLoader(rows, 1, collate_fn=pictures_and_text)
    search = LongestBatchSearch()
    search.bring_forward(loader, 1, 3, None)
    assert search.found is not None
    assert (search.found.tokens, search.found.num_bytes, search.found.seen) == (5, 5 * 8 + 900 * 4, 6)
    assert [batch["pixel_values"].shape[1] for batch in loader] == [9, 900, 9, 9, 9, 9]
    assert [batch["pixel_values"].shape[1] for batch in loader] == [9, 9, 900, 9, 9, 9]
    assert len(loader) == 6


def test_a_training_that_is_seen_to_its_end_keeps_its_order():
    loader = DataLoader(list(range(6)), 2)  # type: ignore[arg-type]
    search = LongestBatchSearch()
    search.bring_forward(loader, 1, 3, 3)
    assert search.found is None
    assert search.is_in_steps
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
