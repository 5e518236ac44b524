"""Data loaders with workers: their rows are read for real while the program is traced."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info
from transformers.image_processing_utils import BaseImageProcessor

from lowmem_ft.virtual_gpu.gpu import VirtualGPU

ROWS, BATCH, VOCABULARY = 32, 8, 100


class _Texts(Dataset):
    """Rows whose length depends on values that are drawn."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> torch.Tensor:
        ids = torch.randint(VOCABULARY, (random.randint(4, 20),))
        return torch.cat([ids[ids > VOCABULARY // 2], torch.tensor([row])])


class _Stream(IterableDataset):
    """Rows of one of several workers."""

    def __iter__(self):
        info = get_worker_info()
        assert info is not None, "not in a worker"
        for row in range(info.id, ROWS, info.num_workers):
            yield torch.tensor([row])


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    """Collate into a tensor that the collator makes, as long as the longest row."""
    batch = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for at, row in enumerate(rows):
        batch[at, : len(row)] = row
    return batch


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"persistent_workers": True, "prefetch_factor": 4, "timeout": 30},
        {"multiprocessing_context": "spawn"},
    ],
    ids=["plain", "persistent", "spawned"],
)
def test_batches_of_workers_train_with_the_values_that_were_read(settings, pin_memory):
    seen = []
    with VirtualGPU("t4") as gpu:
        table = nn.Embedding(VOCABULARY, 16).cuda()
        loader = DataLoader(
            _Texts(), BATCH, num_workers=2, collate_fn=padded, pin_memory=pin_memory, **settings
        )
        for _ in range(2):
            for ids in loader:
                seen += ids.max(1).values.tolist()
                table(ids.to("cuda", non_blocking=True)).sum().backward()
    assert len(seen) == 2 * ROWS
    assert max(seen) < VOCABULARY
    assert len(set(seen)) > 10
    assert (gpu.report().host_pinned_bytes > 0) == pin_memory


def test_tensors_without_values_in_a_data_set_stay_on_the_machine_that_traces_them():
    with VirtualGPU("t4") as gpu:
        rows = TensorDataset(torch.randn(ROWS, 16), torch.arange(ROWS))
        layer = nn.Linear(16, 4).cuda()
        labels = []
        for hidden, label in DataLoader(rows, BATCH, num_workers=3):
            labels += label.tolist()
            nn.functional.cross_entropy(layer(hidden.cuda()), label.cuda() % 4).backward()
    assert labels == list(range(ROWS))
    assert gpu.report().by_category_at_peak["gradient"] >= 16 * 4 * 4


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_stream_is_read_by_one_worker_and_again_in_each_epoch(persistent_workers):
    begun, epochs = [], []
    with VirtualGPU("t4"):
        loader = DataLoader(
            _Stream(),
            BATCH,
            num_workers=4,
            worker_init_fn=lambda number: begun.append((number, get_worker_info().dataset is loader.dataset)),
            persistent_workers=persistent_workers,
        )
        for _ in range(2):
            epochs.append([row for batch in loader for row in batch.flatten().tolist()])
        assert get_worker_info() is None
    assert epochs == [list(range(ROWS))] * 2
    assert begun == [(0, True)] * (1 if persistent_workers else 2)


class _Padding(BaseImageProcessor):
    """Pads rows of pixels in a buffer of its own, as processors that use torch do."""

    def preprocess(self, images: Any, **kwargs: Any) -> Any:
        padded = torch.zeros(len(images), max(images))
        for at, width in enumerate(images):
            padded[at, :width] = torch.rand(width) + 1
        return padded


def test_what_an_image_processor_returns_has_values_in_a_loop_of_the_programs_own():
    with VirtualGPU("t4"):
        pixels: Any = _Padding()([2, 4])  # type: ignore[list-item]
        pixels = pixels.cuda()
        assert (pixels == 0).sum(-1).tolist() == [2, 0]
