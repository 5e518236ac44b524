"""An embedding kept in host memory: only the rows of a batch's tokens are copied to the device, not the table.

The host gathers the rows in a pinned buffer, from which the device copies them by itself. Out of pageable memory CUDA
would not let the host run ahead: it would wait in each forward for everything queued on the device before.

Axes: B rows of the batch, T tokens of a row, N tokens of the batch (B * T), E tokens of the largest batch so far, V
vocabulary, H hidden size, C rows of a chunk of the vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.handle import Handle
from lowmem_ft.foundation.host.copy_engine import CopyEngine, CopyEvent
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.foundation.repetition import rounds
from lowmem_ft.foundation.tensors.gradient_blocks import rows_per_block
from lowmem_ft.techniques.modules.patching import set_attribute
from lowmem_ft.techniques.streaming.tensors import stand_in

TakeGradient = Callable[[nn.Parameter, Tensor, int], None]
"""Callback for a parameter, the finished gradient of a slice of it, and the number of that slice's first element."""

Written = Callable[[], CopyEvent]
"""Callable that returns the end of the last copy of an updated weight back to the host."""

_CHUNK_ELEMENTS = 2**23
"""Elements of the gradient that exist at once; 16 MiB in bfloat16."""


class StreamedEmbedding(Handle):
    """Embedding that reads its rows from host memory.

    The ids are read on the host. :meth:`expect` announces them beforehand; otherwise the host has to wait for the
    device.

    Args:
        embedding: the embedding, whose weight is already in host memory.
        device: the device that the model computes on.
        host: allocates the buffer of a batch's rows.
        held_gradient: returns the gradient, on the host, that a tied head has left; None: it is not tied.

    Raises:
        ModelError: if the embedding changes its weight, or weights gradients by token frequency.
    """

    def __init__(
        self,
        embedding: nn.Embedding,
        device: torch.device,
        host: HostMemory,
        held_gradient: Callable[[], Tensor | None],
    ) -> None:
        if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
            raise ModelError(
                "offload.parameters=stream needs an embedding without max_norm, scale_grad_by_freq and sparse. "
                "Set offload.parameters=device."
            )
        self.parameter = cast(nn.Parameter, embedding.weight)
        self._take: TakeGradient | None = None
        self._written: Written = CopyEvent
        self._embedding = embedding
        self._device = device
        self._host, self._engine = host, CopyEngine(device)
        self._buffer_EH = self.parameter.new_empty(0, self.parameter.shape[1])
        self._copied = CopyEvent()
        self._held_gradient = held_gradient
        self._expected: Tensor | None = None
        self._stock_forward = embedding.forward
        super().__init__(set_attribute(embedding, "forward", self._forward))

    def train_with(self, take: TakeGradient, written: Written) -> None:
        """Pass gradients to ``take``, and wait for ``written`` before reading rows, so that they include updates."""
        self._take, self._written = take, written

    def expect(self, ids_BT: Tensor) -> None:
        """Announce, on the host, the ids of the next forward."""
        self._expected = ids_BT

    def _forward(self, ids_BT: Tensor) -> Tensor:
        ids_N = self._on_host(ids_BT).flatten()
        self._written().synchronize()  # the host reads the rows itself
        rows_NH = nn.Parameter(self._rows_on_device(ids_N), requires_grad=self._is_trained())
        if rows_NH.requires_grad:
            # Models that take the ids to their weight's device (Llama 4) have taken them to the host.
            on_device_N = ids_BT.to(self._device).flatten()
            hook = functools.partial(self._take_gradient, ids_N=on_device_N)
            rows_NH.register_post_accumulate_grad_hook(hook)
        positions_BT = torch.arange(len(ids_N), device=self._device).view(ids_BT.shape)
        # The stock forward, which may scale, on a table of these rows only.
        with Handle(stand_in(self._embedding, rows_NH), set_attribute(self._embedding, "padding_idx", None)):
            hidden_BTH = self._stock_forward(positions_BT)
        # The graph keeps the table for its gradient, which needs only its shape.
        rows_NH.data = torch.zeros((), dtype=rows_NH.dtype, device=self._device).expand(rows_NH.shape)
        return hidden_BTH

    def _rows_on_device(self, ids_N: Tensor) -> Tensor:
        weight_VH = self._embedding.weight.data
        if not self._engine.is_asynchronous:
            return weight_VH[ids_N]
        self._copied.synchronize()  # the rows of the last batch are still to leave the buffer
        if len(self._buffer_EH) < len(ids_N):
            self._buffer_EH = self._host.allocate((len(ids_N), weight_VH.shape[1]), weight_VH.dtype)
        gathered_NH = self._buffer_EH[: len(ids_N)]
        torch.index_select(weight_VH, 0, ids_N, out=gathered_NH)
        rows_NH = torch.empty_like(gathered_NH, device=self._device)
        self._copied = self._engine.to_device(gathered_NH, rows_NH)
        self._engine.wait(self._copied)
        return rows_NH

    def _on_host(self, ids_BT: Tensor) -> Tensor:
        expected, self._expected = self._expected, None
        if expected is not None and expected.shape == ids_BT.shape:
            return expected
        return ids_BT.cpu()

    def _is_trained(self) -> bool:
        return self._take is not None and self._embedding.weight.requires_grad and torch.is_grad_enabled()

    @torch.no_grad()
    def _take_gradient(self, rows_NH: Tensor, *, ids_N: Tensor) -> None:
        """Pass on the table's gradient chunk by chunk: the rows' sums, and zeros for tokens that did not occur."""
        d_rows_NH, rows_NH.grad = rows_NH.grad, None
        assert d_rows_NH is not None
        assert self._take is not None
        weight: Any = self._embedding.weight
        held_VH = self._held_gradient()
        padding = -1 if self._embedding.padding_idx is None else self._embedding.padding_idx
        rows_at_once = _rows_at_once(weight.shape[1])
        for start in rounds(range(0, len(weight), rows_at_once)):
            num_rows = min(rows_at_once, len(weight) - start)
            is_elsewhere_N = (ids_N < start) | (ids_N >= start + num_rows) | (ids_N == padding)
            local_N = torch.where(is_elsewhere_N, num_rows, ids_N - start)
            # One extra row for tokens elsewhere, which this kernel skips.
            d_weight_CH = torch.ops.aten.embedding_dense_backward(
                d_rows_NH, local_N, num_rows + 1, num_rows, False
            )[:num_rows]
            if weight.grad_dtype is not None:
                d_weight_CH = d_weight_CH.to(weight.grad_dtype)  # autograd sums in it
            if held_VH is not None:
                d_weight_CH += held_VH[start : start + num_rows].to(d_weight_CH.device)
            self._take(weight, d_weight_CH, start * weight.shape[1])


def _rows_at_once(num_columns: int) -> int:
    """Return the rows of a chunk, so that each chunk begins at a block of the optimizer's state."""
    rows_of_blocks = rows_per_block(num_columns)
    return max(1, _CHUNK_ELEMENTS // (num_columns * rows_of_blocks)) * rows_of_blocks
