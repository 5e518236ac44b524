"""Batches of made-up tokens, as the data loader makes them of files."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowmem_ft.data.batches.batch import Batch


def batch_of(ids_BT: Tensor, labels_BT: Tensor, lengths: Sequence[int] = ()) -> Batch:
    """A batch of these tokens; rows are padded to the right where lengths are given."""
    num_rows = len(ids_BT)
    return Batch(
        input_ids_BT=ids_BT,
        labels_BT=labels_BT,
        position_ids_BT=None,
        sample_ids=tuple(range(num_rows)),
        num_label_tokens=int((labels_BT != -100).sum()),
        num_tokens=sum(lengths) if lengths else ids_BT.numel(),
    )


def batch_of_two(seed: int, num_tokens: int, vocabulary: int) -> Batch:
    """Two rows of random tokens; all but the first of a row are learnt."""
    ids_BT = torch.randint(3, vocabulary, (2, num_tokens), generator=torch.Generator().manual_seed(seed))
    return batch_of(ids_BT, torch.cat([torch.full((2, 1), -100), ids_BT[:, 1:]], dim=1))
