"""The gradient of a linear layer's weight, accumulated from chunks of tokens and rounded once.

Axes: C tokens of a chunk, N tokens of several chunks, O outputs of the layer, I inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lowmem_ft.techniques.gradients.gradient_sums_in_products import add_product_

_ROWS_AT_ONCE = 8192
"""Rows of a gradient that pass through a temporary together, so that the temporary stays small."""


_REDUCED_SUMS = {
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
    torch.float16: "allow_fp16_reduced_precision_reduction",
}
"""Options, on by default, that let cuBLAS split a sum over tokens and add the parts in 16 bits."""


class WeightGradient:
    """The sum over chunks of ``d_output.T @ input``, as exact as one product over all tokens.

    A half-precision gradient to which each chunk is added would round with every chunk, and an fp32 sum takes 4 * O * I
    bytes that are read and written for every chunk. So the factors are kept for one product at the end if they take
    less memory than that sum; if they take more, a quarter of that size is kept and added at a time. Products sum in
    fp32 throughout, whatever ``torch.backends.cuda.matmul`` allows elsewhere.

    Args:
        shape: O x I.
        dtype: type of the finished gradient, which is the weight's.
        device: its device.
        num_tokens: tokens of all chunks together.
        total_OI: a sum to which the gradient is added without being rounded before, in float32 or the weight's type;
            None: the gradient is a new tensor.
        factor_dtype: type of both tensors of a chunk. If it is given and they cannot all wait, the sum is allocated
            now: later it would be between the chunks' temporaries, and leave holes that nothing fills.
    """

    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        num_tokens: int,
        total_OI: Tensor | None = None,
        factor_dtype: torch.dtype | None = None,
    ) -> None:
        self._shape, self._dtype, self._device = shape, dtype if total_OI is None else total_OI.dtype, device
        self._num_tokens = num_tokens
        self._sum_dtype = torch.promote_types(dtype, torch.float32)
        self._total_OI = total_OI
        self._sum_OI = total_OI if self._dtype == self._sum_dtype else None
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._waiting_tokens = 0
        self._is_written = self._sum_OI is not None
        if factor_dtype is not None and self._most_waiting_tokens(factor_dtype) < num_tokens:
            self._sum_OI = self._allocated(self._sum_OI, self._sum_dtype)

    def add(self, d_output_CO: Tensor, input_CI: Tensor) -> None:
        """Add one chunk. Both tensors may be kept until later: the caller must not write to them any more."""
        self._waiting.append((d_output_CO, input_CI))
        self._waiting_tokens += len(input_CI)
        if self._waiting_tokens > self._most_waiting_tokens(input_CI.dtype):
            self._sum_OI = self._with_waiting_added(self._sum_OI, self._sum_dtype)

    def chunks_added_together(self, chunk_tokens: int, factor_dtype: torch.dtype) -> int:
        """Return how many chunks are kept until they are added to the sum: the period of :meth:`add`'s memory.

        Args:
            chunk_tokens: tokens of each chunk except the last.
            factor_dtype: type of both tensors of a chunk.
        """
        return self._most_waiting_tokens(factor_dtype) // chunk_tokens + 1

    def _most_waiting_tokens(self, factor_dtype: torch.dtype) -> int:
        if self._dtype == self._sum_dtype:
            return 0  # the sum is the gradient itself: keeping factors would take extra memory
        sum_bytes = self._shape.numel() * self._sum_dtype.itemsize
        tokens_of_that_size = sum_bytes // (sum(self._shape) * factor_dtype.itemsize)
        return self._num_tokens if self._num_tokens <= tokens_of_that_size else tokens_of_that_size // 4

    def finish(self) -> Tensor:
        """Return the gradient, O x I, in its own storage; zeros if no chunk was added; or the sum that it was given."""
        if self._sum_OI is None:
            return self._with_waiting_added(self._total_OI, self._dtype)
        sum_OI = self._with_waiting_added(self._sum_OI, self._sum_dtype)
        self._sum_OI = None
        if self._total_OI is None or sum_OI is self._total_OI:
            return sum_OI.to(self._dtype)
        return self._total_OI.add_(sum_OI)

    def _with_waiting_added(self, sum_OI: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the sum and the chunks that wait; a first product that may be rounded is not added to zeros."""
        add_ = add_product_ if self._total_OI is not None else _add_rounded_product_
        sum_OI = self._allocated(sum_OI, dtype)
        if not self._is_written and sum_OI is not self._total_OI:
            if not self._waiting or self._total_OI is not None:
                sum_OI.zero_()
            else:
                add_ = _write_product_
        self._is_written = True
        if self._waiting:
            d_outputs, inputs = zip(*self._waiting, strict=True)
            self._waiting, self._waiting_tokens = [], 0
            _for_rows(add_, sum_OI, d_outputs, _joined(inputs))
        return sum_OI

    def _allocated(self, sum_OI: Tensor | None, dtype: torch.dtype) -> Tensor:
        return torch.empty(self._shape, dtype=dtype, device=self._device) if sum_OI is None else sum_OI


def row_slices(tensor: Tensor) -> Iterator[slice]:
    """Yield slices over the rows of a tensor, a few thousand at a time."""
    return (slice(start, start + _ROWS_AT_ONCE) for start in range(0, len(tensor), _ROWS_AT_ONCE))


def _for_rows(
    add_: Callable[[Tensor, Tensor, Tensor], None],
    sum_OI: Tensor,
    d_outputs: Sequence[Tensor],
    input_NI: Tensor,
) -> None:
    with _sums_in_float32(input_NI.dtype):
        for rows in row_slices(sum_OI):
            add_(sum_OI[rows], _joined([d_output_CO[:, rows] for d_output_CO in d_outputs]), input_NI)


def _write_product_(result_OI: Tensor, d_output_NO: Tensor, input_NI: Tensor) -> None:
    if result_OI.dtype == input_NI.dtype:
        torch.mm(d_output_NO.t(), input_NI, out=result_OI)
    else:
        result_OI.copy_(d_output_NO.t() @ input_NI)


def _add_rounded_product_(sum_OI: Tensor, d_output_NO: Tensor, input_NI: Tensor) -> None:
    if sum_OI.dtype == input_NI.dtype:
        sum_OI.addmm_(d_output_NO.t(), input_NI)
    else:
        sum_OI += d_output_NO.t() @ input_NI


@contextlib.contextmanager
def _sums_in_float32(dtype: torch.dtype) -> Iterator[None]:
    if dtype not in _REDUCED_SUMS:
        yield
        return
    matmul, option = torch.backends.cuda.matmul, _REDUCED_SUMS[dtype]
    was_allowed, may_split = getattr(matmul, option), getattr(matmul, f"{option}_split_k")
    setattr(matmul, option, (False, may_split))
    try:
        yield
    finally:
        setattr(matmul, option, (was_allowed, may_split))


def _joined(chunks: Sequence[Tensor]) -> Tensor:
    return chunks[0] if len(chunks) == 1 else torch.cat(list(chunks))
