"""Results of cuDNN's operators for recurrent layers and for CTC, whose sizes cuDNN decides in part.

What it keeps of recurrent layers for backward, and their workspace, are not published. One run with both is
(github.com/pytorch/pytorch/issues/2895: cuDNN 7, float32, four layers of 320 units): per row and unit, it keeps 23
numbers for LSTM and 27 for GRU, if all the sequences have 25,000 rows. That is 5 for each layer of LSTM (four gates and
the cell) or 6 of GRU, and the output of each layer but the last. MIOpen, whose source is open, keeps up to twice as
much (src/rnn.cpp: 12 and 8 for each layer). cuDNN's workspace was a little more than the weights.
Source of the rest: pytorch, aten/src/ATen/native/cudnn/RNN.cpp and LossCTC.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mode:
    """A kind of layer.

    Args:
        number: cuDNN's number for it.
        num_kept: numbers that a layer keeps for backward, per row and unit.
    """

    number: int
    num_kept: int


MODES = {"rnn_relu": Mode(0, 1), "rnn_tanh": Mode(1, 1), "lstm": Mode(2, 5), "gru": Mode(3, 6)}
"""Kinds of layers by their names in torch."""

_KEPT = {mode.number: mode.num_kept for mode in MODES.values()}


def recurrent_layers(*args: Any) -> tuple[Tensor, ...]:
    """Return the outputs of ``aten._cudnn_rnn``, states, cells, what backward reads, and the weights in one buffer."""
    rows, weights, _, buffer, hx, cx, mode, hidden_size, projected, num_layers, batch_first, _ = args[:12]
    is_training, is_bidirectional, sizes = args[12:15]
    directions = 2 if is_bidirectional else 1
    batch = sizes[0] if sizes else rows.shape[0 if batch_first else 1]
    width = (projected or hidden_size) * directions
    steps_first = rows.transpose(0, 1) if batch_first and not sizes else rows
    output = rows.new_empty((*steps_first.shape[:-1], width))
    num_rows = math.prod(rows.shape[:-1])
    kept = num_rows * hidden_size * directions * (_KEPT[mode] * num_layers + num_layers - 1)
    return (
        output.transpose(0, 1) if batch_first and not sizes else output,
        hx.new_empty((num_layers * directions, batch, projected or hidden_size)),
        hx.new_empty((0,) if cx is None else (num_layers * directions, batch, hidden_size)),
        rows.new_empty((kept * rows.element_size() if is_training else 0,), dtype=torch.uint8),
        rows.new_empty((sum(each.numel() for each in weights),)) if buffer is None else buffer,
    )


def recurrent_layers_backward(*args: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, list[Tensor]]:
    """Return the gradients of rows, states, cells and weights; those of weights are views of one buffer."""
    rows, weights, stride, buffer, hx, cx = args[:6]
    is_training, wanted = args[16], args[-1]
    if not is_training:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")
    of_weights = _views(buffer.new_empty(buffer.shape), weights, has_biases=stride > 3) if wanted[3] else []
    of_cells = None if cx is None else torch.empty_like(cx)
    return torch.empty_like(rows), torch.empty_like(hx), of_cells, of_weights


def _views(buffer: Tensor, weights: Sequence[Tensor], *, has_biases: bool) -> list[Tensor]:
    """Return the weights' gradients: cuDNN has biases in any case, so where the layers lack them, these are copies."""
    if not has_biases:
        return [torch.empty_like(each) for each in weights]
    sizes = [each.numel() for each in weights]
    parts = buffer[: sum(sizes)].split(sizes)
    return [part.view_as(each) for part, each in zip(parts, weights, strict=True)]


def ctc_loss(log_probs: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Return the losses of rows and the gradient, which cuDNN computes at once."""
    return log_probs.new_empty(log_probs.shape[1:2]), torch.empty_like(
        log_probs, memory_format=torch.contiguous_format
    )
