"""Padding is counted as the micro-batches of an epoch have it."""

import pytest

from lowmem_ft.data.batches.order import epoch_order
from lowmem_ft.data.batches.padding import padding_of
from lowmem_ft.data.batches.position import DataPosition
from lowmem_ft.data.batches.stream import DataStream
from lowmem_ft.foundation.parallel_plan import ParallelPlan


@pytest.mark.parametrize(
    "settings",
    [{}, {"group_by_length": True}, {"packing": True}, {"shuffle": False}],
    ids=["shuffled", "grouped", "packed", "in order"],
)
@pytest.mark.parametrize("rows_per_batch", [1, 3, 4])
def test_it_is_that_of_the_batches(settings, rows_per_batch, write_jsonl, load):
    rows = [
        {"prompt": "so " * count, "completion": "yes"} for count in (1, 30, 2, 9, 17, 44, 5, 5, 60, 3, 28)
    ]
    data = load(write_jsonl(rows), max_length=50, seed=3, **settings)
    stream = DataStream(
        data.train,
        position=DataPosition(seed=3),
        per_device_batch_size=rows_per_batch,
        gradient_accumulation_steps=1,
        plan=ParallelPlan(),
        collate=data.collate,
    )
    batches = [batch for _ in range(stream.steps_per_epoch) for batch in stream.next_window().batches]
    order = epoch_order(
        data.train.row_lengths,
        seed=3,
        epoch=0,
        shuffle=settings.get("shuffle", True),
        group_by_length=settings.get("group_by_length", False),
    )
    padding = padding_of(data.train.row_lengths[order], rows_per_batch, data.collate.padded_length)
    assert padding.computed == sum(batch.input_ids_BT.numel() for batch in batches)
    assert padding.tokens == sum(batch.num_tokens for batch in batches)
    assert padding.num_rows == sum(len(batch.input_ids_BT) for batch in batches)
    assert padding.share == 1 - padding.tokens / padding.computed
