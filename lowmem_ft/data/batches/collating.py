"""Collating rows to one micro-batch of tensors.

Axes: B rows of the micro-batch, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lowmem_ft.data.batches.batch import Batch
from lowmem_ft.data.row import IGNORED_LABEL, LENGTH_MULTIPLE, Row


@dataclass(frozen=True, kw_only=True)
class Collator:
    """Pads rows to the longest of them, on the right.

    Packed rows have positions that restart with every document, and the padding at the end of a row is a separate
    document. transformers builds the block-diagonal mask from them for sdpa, eager and flex attention; flash attention
    finds document borders in a single row only (``modeling_flash_attention_utils._is_packed_sequence``), so for it
    all documents are laid end to end in one row.

    Args:
        pad_token_id: id that fills rows up; any will do, as it has no label and no real token attends to it.
        max_length: rows are not padded beyond it; None: no limit.
        packed: whether rows hold several documents.
        in_one_row: whether to lay packed rows end to end (flash attention).
    """

    pad_token_id: int
    max_length: int | None
    packed: bool = False
    in_one_row: bool = False

    def __call__(self, rows: Sequence[Row], *, learn: bool = True) -> Batch:
        """Collate one micro-batch.

        Args:
            rows: at least one.
            learn: False gives the same tensors without labels and samples, for a process that has no examples left to
                compute while others still have.

        Returns:
            The batch, on the host.
        """
        if self.packed and self.in_one_row:
            rows = [[example for row in rows for example in row]]
        width = self._width(rows)
        input_ids_BT = np.full((len(rows), width), self.pad_token_id, dtype=np.int64)
        labels_BT = np.full((len(rows), width), IGNORED_LABEL, dtype=np.int64)
        positions_BT = np.zeros((len(rows), width), dtype=np.int64)
        for b, row in enumerate(rows):
            end = 0
            for example in row:
                start, end = end, end + len(example.input_ids_T)
                input_ids_BT[b, start:end] = example.input_ids_T
                labels_BT[b, start:end] = example.labels_T if learn else IGNORED_LABEL
                positions_BT[b, start:end] = np.arange(end - start)
            positions_BT[b, end:] = np.arange(width - end)
        examples = [example for row in rows for example in row] if learn else []
        return Batch(
            input_ids_BT=torch.from_numpy(input_ids_BT),
            labels_BT=torch.from_numpy(labels_BT),
            position_ids_BT=torch.from_numpy(positions_BT) if self.packed else None,
            sample_ids=tuple(example.sample_id for example in examples),
            num_label_tokens=int((labels_BT != IGNORED_LABEL).sum()),
            num_tokens=sum(len(example.input_ids_T) for example in examples),
            lengths=tuple(sum(len(example.input_ids_T) for example in row) for row in rows),
        )

    def padded_length(self, longest: int) -> int:
        """Return the length of all rows of a micro-batch whose longest has ``longest`` tokens."""
        rounded = -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        if self.max_length is None or (self.packed and self.in_one_row):
            return rounded
        return max(longest, min(rounded, self.max_length))

    def _width(self, rows: Sequence[Row]) -> int:
        return self.padded_length(max(sum(len(example.input_ids_T) for example in row) for row in rows))
