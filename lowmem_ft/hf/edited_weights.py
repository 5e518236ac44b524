"""Weights that a callback or a script writes between two steps: the masters beside them follow.

A master is what the next update starts from. Left as it was, it would undo what somebody has written into its weight;
beside a weight that has become 0, the lower bits of one in two parts make no number at all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch import nn
from torch.optim import Optimizer

from lowmem_ft.optimizers import ChunkedOptimizer

logger = logging.getLogger(__name__)


class EditedWeights:
    """Knows which weights were written by anybody else than their optimizer.

    Limits: what is written through ``parameter.data``, of which torch keeps no count, is not seen.

    Args:
        optimizer: with its state; only ours keeps masters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._counts: dict[nn.Parameter, tuple[int, int]] = {}
        self._is_told = False
        self.are_ours()

    def are_ours(self) -> None:
        """All that has been written up to now was the optimizer's, or came with the masters."""
        self._counts = {weight: _count(weight) for weight in self._with_masters()}

    def adopt(self) -> None:
        """Let the masters of what was written since be what it is now."""
        changed = [weight for weight, count in self._counts.items() if _count(weight) != count]
        if not changed:
            return
        assert isinstance(self._optimizer, ChunkedOptimizer)
        self._optimizer.adopt_weights(changed)
        self.are_ours()
        if not self._is_told:
            logger.info(
                "Weights were changed between two steps (%d tensors): their masters follow.", len(changed)
            )
            self._is_told = True

    def _with_masters(self) -> Iterator[nn.Parameter]:
        optimizer = self._optimizer
        if isinstance(optimizer, ChunkedOptimizer):
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    if weight in optimizer.state and optimizer.master_of(weight).tensors:
                        yield weight


def _count(weight: nn.Parameter) -> tuple[int, int]:
    """Of writes, and where the values are: another tensor may have been put there."""
    return weight.data_ptr(), weight._version
