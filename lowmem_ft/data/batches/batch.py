"""One micro-batch, in the form that the training step takes.

Axes: B examples (rows) of the micro-batch, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from lowmem_ft.data.row import IGNORED_LABEL
from lowmem_ft.foundation.devices import sent_to

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class LabelledRows:
    """Inputs of the model for some rows, on any device; rows are right-padded.

    There is no attention mask: under causal attention a real token never attends to the padding on its right, and
    padding has no label, so the mask would change no number and would only rule out the fast attention kernels.
    Packed rows have ``position_ids_BT`` that restart at 0 with every document; from them transformers builds the
    mask (or the sequence boundaries) that keeps documents apart. Only the routers' load-balancing loss gets a padding
    mask (``techniques/loss/router_loss.py``).

    Args:
        input_ids_BT: int64 token ids.
        labels_BT: int64; equals the token id where the token is to be learnt, else -100. Not shifted: the model
            predicts token ``t`` from the tokens before it, so column 0 is always -100.
        position_ids_BT: int64 positions inside each document, or None for rows of one document.
        num_label_tokens: labels that are not -100, counted on the host to avoid a sync with the device.
        labels_are_shifted: whether a token's label is instead that of the token after it: rows that are cut have the
            label of their last token elsewhere.
    """

    input_ids_BT: torch.Tensor
    labels_BT: torch.Tensor
    position_ids_BT: torch.Tensor | None
    num_label_tokens: int
    labels_are_shifted: bool = False

    def model_inputs(self) -> dict[str, torch.Tensor]:
        """Return the keyword arguments of a HuggingFace causal LM's ``forward``, except ``labels``."""
        inputs = {"input_ids": self.input_ids_BT}
        if self.position_ids_BT is not None:
            inputs["position_ids"] = self.position_ids_BT
        if self.labels_are_shifted:
            inputs["shift_labels"] = self.labels_BT
        return inputs

    def to(self, device: torch.device) -> Self:
        """Return the same rows with their tensors on ``device``."""
        positions = self.position_ids_BT
        return replace(
            self,
            input_ids_BT=sent_to(self.input_ids_BT, device),
            labels_BT=sent_to(self.labels_BT, device),
            position_ids_BT=None if positions is None else sent_to(positions, device),
        )


@dataclass(frozen=True, kw_only=True)
class Batch(LabelledRows):
    """One micro-batch: its rows, their examples and their tokens.

    Args:
        sample_ids: the ids of the examples in this micro-batch, in row order (several per packed row).
        num_tokens: tokens that are not padding.
        lengths: tokens of each row before its padding, for a loss that reads no labels; None: no row has padding.
    """

    sample_ids: tuple[int, ...]
    num_tokens: int
    lengths: tuple[int, ...] | None = None


def merged(batches: Sequence[Batch]) -> Batch:
    """Merge the rows of several micro-batches into one, padded on the right to the longest.

    Its losses and counts are the sums of theirs: padding has no label. Rows are never as long as there are rows, so
    that a tensor whose first axis has that number of rows is known to hold rows.

    Args:
        batches: at least one; all on one device, all packed or none.

    Returns:
        One batch.
    """
    num_rows = sum(len(batch.input_ids_BT) for batch in batches)
    length = max(batch.input_ids_BT.shape[1] for batch in batches)
    length += length == num_rows
    positions_BT = None
    if batches[0].position_ids_BT is not None:
        positions_BT = torch.cat([_padded_positions(batch, length) for batch in batches])
    return Batch(
        input_ids_BT=torch.cat([_padded(batch.input_ids_BT, length, 0) for batch in batches]),
        labels_BT=torch.cat([_padded(batch.labels_BT, length, IGNORED_LABEL) for batch in batches]),
        position_ids_BT=positions_BT,
        sample_ids=tuple(sample for batch in batches for sample in batch.sample_ids),
        num_label_tokens=sum(batch.num_label_tokens for batch in batches),
        num_tokens=sum(batch.num_tokens for batch in batches),
    )


def _padded(tensor_BT: torch.Tensor, length: int, value: int) -> torch.Tensor:
    return F.pad(tensor_BT, (0, length - tensor_BT.shape[1]), value=value)


def _padded_positions(batch: Batch, length: int) -> torch.Tensor:
    """Return positions in which padding is a separate document, as in ``collating.Collator``."""
    positions_BT = batch.position_ids_BT
    assert positions_BT is not None, "all packed or none"
    padding_BT = torch.arange(length - positions_BT.shape[1], device=positions_BT.device).expand(
        len(positions_BT), -1
    )
    return torch.cat([positions_BT, padding_BT], dim=1)
