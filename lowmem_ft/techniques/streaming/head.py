"""A head kept in host memory: tiles of its weight are streamed for the loss, all of it is copied for logits.

Axes: B rows of the batch, T tokens of a row, V vocabulary, H hidden size, W vocabulary of one tile.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from lowmem_ft.foundation.handle import Handle
from lowmem_ft.foundation.host.copy_engine import CopyEngine, CopyEvent
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.techniques.modules.patching import set_attribute
from lowmem_ft.techniques.streaming.embedding import TakeGradient, Written
from lowmem_ft.techniques.streaming.tensors import stand_in


class StreamedHead(Handle):
    """Head whose weight is streamed to the device.

    It is a ``head_tiles.HeadTiles``, for a loss that works tile by tile; calling the head itself returns logits.

    Args:
        head: the head, whose weight is in host memory.
        device: the device that the model computes on.
        host: holds the gradient of a tied weight until the embedding's is there.
        is_tied: whether the embedding has the same weight.
    """

    def __init__(self, head: nn.Linear, device: torch.device, host: HostMemory, *, is_tied: bool) -> None:
        self.parameter = cast(nn.Parameter, head.weight)
        self._head = head
        self._device = device
        self._host = host
        self._is_tied = is_tied
        self._engine = CopyEngine(device)
        self._on_its_way: dict[int, tuple[Tensor, CopyEvent]] = {}
        self._last_start = -1
        self._take: TakeGradient | None = None
        self._written: Written = CopyEvent
        self._held_VH: Tensor | None = None
        self._stock_forward = head.forward
        super().__init__(
            set_attribute(head, "forward", self._forward),
            head.register_forward_hook(self._end_visit, always_call=True).remove,
        )

    def train_with(self, take: TakeGradient, written: Written) -> None:
        """Pass gradients to ``take`` from now on, or to the embedding if both share their weight.

        Args:
            take: the callback that updates the weight.
            written: returns the end of the last copy of these updates back to the host; no tile's copy starts before
                it.
        """
        self._take, self._written = take, written
        if self._is_tied:
            weight = self.parameter
            self._held_VH = self._host.allocate(weight.shape, weight.dtype, "gradient")

    def held_gradient(self) -> Tensor | None:
        """Return the gradient on the host that the embedding still has to add to; None if the weight is not tied."""
        self._engine.synchronize()
        return self._held_VH

    def abandon(self) -> None:
        """Release gradients that were being copied to the host; tiles went with the forward that failed."""
        self._engine.forget_sources()

    def weight(self, rows: slice) -> Tensor:
        """Return these rows on the device, and start copying the next tile."""
        here, arrived = self._on_its_way.pop(rows.start, None) or self._send(rows)
        self._forget_others()
        following = self._following(rows)
        if following is not None:
            self._on_its_way[following.start] = self._send(following)
        self._last_start = rows.start
        self._engine.wait(arrived)
        return here

    def sum_of(self, rows: slice) -> None:
        """Return None: the gradient of a streamed weight comes once a step, and goes where the weight is."""

    def add_gradient(self, rows: slice, d_weight_WH: Tensor) -> None:
        """Pass the finished gradient of these rows on."""
        if self._held_VH is not None:
            self._engine.to_host(d_weight_WH, self._held_VH[rows])
        else:
            assert self._take is not None, "train_with() comes first"
            self._take(self.parameter, d_weight_WH, rows.start * d_weight_WH.shape[1])

    def _following(self, rows: slice) -> slice | None:
        """Return the next tile while they ascend for the loss; none is prefetched on the way down for gradients."""
        num_all, num_rows = len(self.parameter), rows.stop - rows.start
        if rows.start > self._last_start and rows.stop < num_all:
            return slice(rows.stop, min(rows.stop + num_rows, num_all))
        return None

    def _send(self, rows: slice) -> tuple[Tensor, CopyEvent]:
        values = self.parameter.data[rows]
        place = torch.empty_like(values, device=self._device)
        return place, self._engine.to_device(values, place, after=(self._engine.now(), self._written()))

    def _forget_others(self) -> None:
        """Release tiles that were prefetched in vain, whose memory may be used again once they have arrived."""
        for _, arrived in self._on_its_way.values():
            self._engine.wait(arrived)
        self._on_its_way.clear()

    def _forward(self, hidden_BTH: Tensor) -> Tensor:
        """Run the stock forward, with all of the weight on the device."""
        is_trained = self._take is not None and self.parameter.requires_grad and torch.is_grad_enabled()
        whole = slice(0, len(self.parameter))
        visitor = nn.Parameter(self.weight(whole), requires_grad=is_trained)
        if is_trained:
            visitor.register_post_accumulate_grad_hook(self._take_from_autograd)
        with Handle(stand_in(self._head, visitor)):
            return self._stock_forward(hidden_BTH)

    def _take_from_autograd(self, visitor: Tensor) -> None:
        gradient, visitor.grad = visitor.grad, None
        assert gradient is not None, "the hook comes after a gradient"
        self.add_gradient(slice(0, len(gradient)), gradient)

    def _end_visit(self, *_: Any) -> None:
        self._forget_others()
        self._last_start = -1
