"""The windows of a run: independent of how the global batch is divided, resumable, complete."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from lowmem_ft.data.batches.position import DataPosition
from lowmem_ft.data.batches.stream import DataStream, eval_batches
from lowmem_ft.foundation.errors import DataError
from lowmem_ft.foundation.parallel_plan import ParallelPlan

KINDS = {
    "padded": {},
    "grouped": {"group_by_length": True},
    "packed": {"packing": True, "max_length": 48},
    "in file order": {"shuffle": False},
    "streamed": {"streaming": True, "shuffle_buffer_size": 8},
    "streamed and packed": {"streaming": True, "packing": True, "max_length": 48},
}


@pytest.fixture(params=KINDS)
def data(request, write_jsonl, load):
    lengths = np.random.default_rng(0).integers(1, 12, 37).tolist()
    rows = [{"prompt": f"{i} and", "completion": " two" * length} for i, length in enumerate(lengths)]
    return load(write_jsonl(rows), **KINDS[request.param])


@pytest.fixture
def mapped(write_jsonl, load):
    return load(write_jsonl([{"prompt": f"{i} and", "completion": " two" * (i + 1)} for i in range(10)]))


def stream(data, *, batch=2, steps=2, processes=1, rank=0, position=None):
    return DataStream(
        data.train,
        position=position or DataPosition(seed=4),
        per_device_batch_size=batch,
        gradient_accumulation_steps=steps,
        plan=ParallelPlan(num_processes=processes, rank=rank),
        collate=data.collate,
    )


def windows_of_an_epoch(of):
    windows = []
    while of.position.epoch == 0:
        window = of.next_window()
        if window.position.epoch > 0 and window.position.index > 0:
            break  # a stream learns of the end of the epoch from the first window of the next one
        windows.append(window)
    return windows


def sample_ids(window):
    return [sample_id for batch in window.batches for sample_id in batch.sample_ids]


def test_an_epoch_has_every_example_once_whatever_the_batch(data):
    for batch, steps in ((1, 1), (2, 2), (3, 4), (8, 8)):
        windows = windows_of_an_epoch(stream(data, batch=batch, steps=steps))
        assert sorted(i for window in windows for i in sample_ids(window)) == list(range(37))


@pytest.mark.parametrize("batch, steps, processes", [(2, 1, 2), (1, 2, 2), (1, 1, 4), (1, 4, 1), (4, 1, 1)])
def test_processes_together_see_the_global_batch_of_one(data, batch, steps, processes):
    one = windows_of_an_epoch(stream(data, batch=2, steps=2))
    shared = [
        windows_of_an_epoch(stream(data, batch=batch, steps=steps, processes=processes, rank=rank))
        for rank in range(processes)
    ]
    for index, window in enumerate(one):
        parts = [windows[index] for windows in shared]
        assert {len(part.batches) for part in parts} == {len(parts[0].batches)}
        assert all(part.position == window.position for part in parts)
        interleaved = [
            batch for batches in zip(*(part.batches for part in parts), strict=True) for batch in batches
        ]
        assert [i for batch in interleaved for i in batch.sample_ids] == sample_ids(window)
        assert sum(b.num_label_tokens for b in interleaved) == sum(b.num_label_tokens for b in window.batches)


def test_a_process_without_a_share_gets_micro_batches_without_labels(mapped):
    last = [
        windows_of_an_epoch(stream(mapped, batch=1, steps=3, processes=3, rank=rank))[-1] for rank in range(3)
    ]
    assert [len(window.batches) for window in last] == [1, 1, 1]  # 10 rows: 9 and 1
    for window in last[1:]:
        (empty,) = window.batches
        assert (empty.sample_ids, empty.num_label_tokens, empty.num_tokens) == ((), 0, 0)
        assert (empty.labels_BT == -100).all()
        assert torch.equal(empty.input_ids_BT, last[0].batches[0].input_ids_BT)


def test_resuming_gives_exactly_the_windows_that_would_have_come(data):
    straight = stream(data)
    windows = [straight.next_window() for _ in range(30)]  # over several epochs
    assert windows[-1].position.epoch >= 1
    for stop in (0, 3, 11, 20):
        position = DataPosition(**json.loads(json.dumps(asdict(windows[stop].position))))
        resumed = stream(data, position=position)
        for expected in windows[stop + 1 : stop + 6]:
            window = resumed.next_window()
            assert window.position == expected.position
            assert window.epoch == expected.epoch
            for got, want in zip(window.batches, expected.batches, strict=True):
                assert got.sample_ids == want.sample_ids
                assert torch.equal(got.labels_BT, want.labels_BT)


def test_resuming_with_another_batch_shape_goes_on_where_it_stopped(mapped):
    first = stream(mapped, batch=1, steps=4)
    before = sample_ids(first.next_window())
    rest = windows_of_an_epoch(stream(mapped, batch=3, steps=1, position=first.position))
    after = [i for window in rest for i in sample_ids(window)]
    assert sorted(before + after) == list(range(10))


def test_a_position_beyond_the_data_is_an_error(mapped):
    with pytest.raises(DataError, match="stopped at row 10 of an epoch, but the data has 10 rows now"):
        stream(mapped, position=DataPosition(seed=0, index=10))


def test_epochs_are_counted(mapped):
    of = stream(mapped, batch=1, steps=4)
    assert of.steps_per_epoch == 3
    assert [of.next_window().epoch for _ in range(4)] == [0.4, 0.8, 1.0, 1.4]
    assert of.position == DataPosition(seed=4, epoch=1, index=4)


def test_the_longest_example_comes_first(mapped):
    assert stream(mapped, batch=1, steps=1).next_window().batches[0].sample_ids == (9,)


def test_global_generators_are_not_touched(data):
    before = torch.get_rng_state()
    state = np.random.get_state()[1].tolist()
    windows_of_an_epoch(stream(data))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.random.get_state()[1].tolist() == state


@pytest.mark.parametrize("processes", [1, 3])
def test_evaluation_sees_every_example_once_in_order_on_equally_many_batches(mapped, processes):
    shares = [
        list(
            eval_batches(
                mapped.train,
                batch_size=2,
                plan=ParallelPlan(num_processes=processes, rank=r),
                collate=mapped.collate,
            )
        )
        for r in range(processes)
    ]
    assert len({len(share) for share in shares}) == 1
    assert sorted(i for share in shares for batch in share for i in batch.sample_ids) == list(range(10))
