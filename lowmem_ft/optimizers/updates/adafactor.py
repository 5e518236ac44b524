"""Adafactor: AdamW's second moment as one row and one column per matrix, and no first moment."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.optimizers.updates.update_rule import Chunk, Chunks, Step, WholeParameterRule

# Shapes: R rows and C columns of a matrix; a tensor of more dimensions is M matrices. r, c: part of R, C.

_EPS = 1e-30
_CLIP_THRESHOLD = 1.0
_DECAY_RATE = -0.8


class Adafactor(WholeParameterRule):
    """Adafactor: each element's squared gradient is estimated as its row's mean times its column's, over the matrix's.

    The learning rate is the recipe's, as with ``Trainer(optim="adafactor")``; try AdamW's first. A gradient is read
    three times: for the statistics, for the size of the step, which is clipped to a root mean square of 1, and for the
    step.

    Equals: ``transformers.Adafactor(scale_parameter=False, relative_step=False)``, up to the rounding of sums in
    float32, which are computed chunk by chunk here.

    Frees: all except about 1/500 of AdamW's state. Rows and columns stay in float32 on the device, so that a recipe
    cannot request another ``optimizer.state``; the second moment of vectors is kept element by element.
    Costs: no momentum.

    Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018.
    """

    def averages(self, shape: torch.Size, hyperparameters: Mapping[str, Any]) -> dict[str, bool]:
        """Return the average of vectors: the squared gradient."""
        return {} if len(shape) > 1 else {"exp_avg_sq": False}

    def statistics(self, shape: torch.Size) -> dict[str, int]:
        """Return the lengths of the mean squared gradients of rows and of columns."""
        if len(shape) < 2:
            return {}
        return {"exp_avg_sq_row": shape[:-1].numel(), "exp_avg_sq_col": shape[:-2].numel() * shape[-1]}

    def row_length(self, shape: torch.Size) -> int:
        """Return the number of columns of a matrix."""
        return shape[-1] if len(shape) > 1 else 1

    def measured_step(
        self,
        shape: torch.Size,
        chunks: Chunks,
        statistics: Mapping[str, Tensor],
        number: int,
        hyperparameters: Mapping[str, Any],
    ) -> Step:
        """Return the update, from ``lr`` and decoupled ``weight_decay``."""
        decay = 1.0 - number**_DECAY_RATE
        if len(shape) > 1:
            matrices = _Matrices(shape, statistics["exp_avg_sq_row"], statistics["exp_avg_sq_col"])
            matrices.add_gradient(chunks, decay)
            scaled = matrices.scaled_gradient
        else:
            scaled = functools.partial(_scaled_gradient, decay=decay)
        squares = torch.empty(len(chunks), device=chunks.device)
        for index, chunk in enumerate(chunks):
            squares[index] = scaled(chunk).square_().sum()
        rms = (squares.sum() / shape.numel()).sqrt_()
        lr, weight_decay = hyperparameters["lr"], hyperparameters["weight_decay"]
        length = lr / (rms / _CLIP_THRESHOLD).clamp_(min=1.0)

        def update(weight: Tensor, chunk: Chunk) -> None:
            step = scaled(chunk).mul_(length)
            for average in chunk.averages.values():
                average.copy_(_next_average(chunk, decay))
            if weight_decay != 0:
                weight.mul_(1 - lr * weight_decay)
            weight.sub_(step)

        return update


def _scaled_gradient(chunk: Chunk, decay: float) -> Tensor:
    """Return the gradient over the root of its second moment, element by element."""
    return _next_average(chunk, decay).rsqrt_().mul_(chunk.gradient)


def _next_average(chunk: Chunk, decay: float) -> Tensor:
    """Return the squared gradient's average after this step."""
    return (
        chunk.gradient.square().add_(_EPS).mul_(1.0 - decay).add_(chunk.averages["exp_avg_sq"], alpha=decay)
    )


class _Matrices:
    """The statistics of a parameter, one matrix or several of them."""

    def __init__(self, shape: torch.Size, row: Tensor, col: Tensor) -> None:
        self.num_rows, self.num_columns = shape[-2], shape[-1]
        self.row_MR, self.col_MC = row.view(-1, self.num_rows), col.view(-1, self.num_columns)

    def add_gradient(self, chunks: Chunks, decay: float) -> None:
        """Move the averages towards a squared gradient."""
        self.row_MR.mul_(decay)
        self.col_MC.mul_(decay)
        for chunk in chunks:
            square = chunk.gradient.square().add_(_EPS)
            for part_rC, matrix, rows in self._rows_of(square, chunk.start):
                self.row_MR[matrix, rows].add_(part_rC.mean(1), alpha=1.0 - decay)
                self.col_MC[matrix].add_(part_rC.sum(0), alpha=(1.0 - decay) / self.num_rows)

    def scaled_gradient(self, chunk: Chunk) -> Tensor:
        """Return the gradient over the root of its second moment, flat."""
        gradient = chunk.gradient.clone()
        for part_rC, matrix, rows in self._rows_of(gradient, chunk.start):
            row_R = self.row_MR[matrix]
            part_rC.mul_((row_R[rows] / row_R.mean()).rsqrt_()[:, None]).mul_(self.col_MC[matrix].rsqrt())
        return gradient

    def _rows_of(self, flat: Tensor, start: int) -> Iterator[tuple[Tensor, int, slice]]:
        """Yield views of whole rows, each of one matrix, with its number and the range of its rows."""
        first, last = start // self.num_columns, (start + flat.numel()) // self.num_columns
        row = first
        while row < last:
            matrix, offset = divmod(row, self.num_rows)
            stop = min(last, row + self.num_rows - offset)
            part = flat[(row - first) * self.num_columns : (stop - first) * self.num_columns]
            yield part.view(-1, self.num_columns), matrix, slice(offset, offset + stop - row)
            row = stop
