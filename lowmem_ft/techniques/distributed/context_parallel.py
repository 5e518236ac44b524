"""Context parallelism: the tokens of each row are spread over several processes, by torch's ``context_parallel``.

Axes: B rows, T tokens of a row; after the cut, those of this process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn import functional as F

from lowmem_ft.foundation.devices import sent_to
from lowmem_ft.techniques.attention.ring_attention import ring_running
from lowmem_ft.techniques.technique import Technique

__all__ = ["enable_context_parallel"]

log = logging.getLogger(__name__)

_IGNORED = -100

_PARTS = 2
"""Parts of a row in each process: one from its head and one from its tail, so that all have as much to do."""

_EXCHANGE, _EXCHANGE_BY_DEFAULT = "alltoall", "allgather"
"""Exchange of keys and values: a part at a time, while the one before is computed with. torch's default gathers those
of the whole row in each process."""


@dataclass(frozen=True, kw_only=True)
class OwnTokens:
    """The tokens of some rows that are this process's, on its device.

    Args:
        input_ids_BT: int64 token ids.
        next_labels_BT: int64; the label of the token *after* each, which may be another process's; else -100.
        position_ids_BT: int64 positions in the whole row; they have a gap.
        num_label_tokens: labels that are not -100, counted on the host.
    """

    input_ids_BT: Tensor
    next_labels_BT: Tensor
    position_ids_BT: Tensor
    num_label_tokens: int


class ContextParallel(Technique):
    """The processes that share the tokens of each row; see :func:`enable_context_parallel`.

    Args:
        mesh: the processes of the context group, in one dimension, in the order of their tokens.
        device: the device of this one.
        block_tokens: tokens of which a part of a row must be a multiple.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device, block_tokens: int = 1) -> None:
        super().__init__(functools.partial(set_rotate_method, _EXCHANGE_BY_DEFAULT))
        set_rotate_method(_EXCHANGE)
        self._mesh, self._device = mesh, device
        self._multiple = _PARTS * mesh.size() * block_tokens

    @contextlib.contextmanager
    def spread(self, input_ids_BT: Tensor, labels_BT: Tensor) -> Iterator[OwnTokens]:
        """Yield this process's tokens of some rows; forward and backward run in the ``with`` block.

        Rows are padded on the right, where no real token sees them, until each process gets as many whole parts.

        Args:
            input_ids_BT: int64, on the host; the same in all processes of the group.
            labels_BT: int64; not shifted.
        """
        num_rows, length = input_ids_BT.shape
        whole = -(-length // self._multiple) * self._multiple
        if whole // self._mesh.size() == num_rows:  # a first axis of that size is known to hold rows
            whole += self._multiple
        next_labels_BT = F.pad(labels_BT, (0, whole - length + 1), value=_IGNORED)[:, 1:].contiguous()
        rows = [
            sent_to(tensor_BT, self._device)
            for tensor_BT in (
                F.pad(input_ids_BT, (0, whole - length)),
                next_labels_BT.clone(),  # torch cuts in place, and the count is of the whole row
                torch.arange(whole).repeat(num_rows, 1),
            )
        ]
        with (
            context_parallel(
                self._mesh, buffers=rows, buffer_seq_dims=[1] * len(rows), no_restore_buffers=set(rows)
            ),
            ring_running(),
        ):
            yield OwnTokens(
                input_ids_BT=rows[0],
                next_labels_BT=rows[1],
                position_ids_BT=rows[2],
                num_label_tokens=self._num_labels(next_labels_BT),
            )

    def _num_labels(self, next_labels_BT: Tensor) -> int:
        """Return how many labels of the whole rows are of this process's tokens, without asking the device."""
        parts = next_labels_BT.chunk(_PARTS * self._mesh.size(), dim=1)
        index = self._mesh.get_local_rank()
        return sum(int((part != _IGNORED).sum()) for part in (parts[index], parts[-1 - index]))


def enable_context_parallel(mesh: DeviceMesh, device: torch.device, block_tokens: int = 1) -> ContextParallel:
    """Spread the tokens of each row over several processes, each of which runs the whole model on its part.

    Frees: each of N processes holds the activations, logits and inputs of 1/N of a row's tokens.
    Costs: in each layer the keys and values of all tokens cross the link, in forward, in backward with their
    gradients in float32, and in a recomputation.
    Equals: one process with the whole rows, except for the order of sums.
    Limits: causal attention without masks, in a model that was loaded with ``RING_ATTENTION``; nothing else in it
    may mix the tokens of a row. The loss of a process is the sum over its own tokens, and gradients are to be summed
    over all processes.
    Source: Liu et al., Ring Attention, 2023 (arXiv:2310.01889); ``torch.distributed.tensor.experimental``.

    Args:
        mesh: the processes that share each row, in one dimension.
        device: the device of this one.
        block_tokens: tokens of which a part of a row must be a multiple, by the kernel of attention.

    Returns:
        A technique whose :meth:`ContextParallel.spread` surrounds forward and backward.
    """
    log.info("Context parallelism: the tokens of each row are spread over %d processes.", mesh.size())
    return ContextParallel(mesh, device, block_tokens)
