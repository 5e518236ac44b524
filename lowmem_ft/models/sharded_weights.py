"""Sharded loading: each process keeps its own rows of every weight, so that no process holds the whole model.

What looks at values comes after the rows have been put together (``Ranks.shard``): until then weights are hollow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from lowmem_ft.foundation.parallel_plan import ParallelPlan
from lowmem_ft.foundation.system.malloc import return_free_memory
from lowmem_ft.foundation.tensors.local_shards import rows_of
from lowmem_ft.models.weights_on_disk import each_weight_moved_by


@contextlib.contextmanager
def weights_in_shards(plan: ParallelPlan, device: torch.device) -> Iterator[dict[nn.Parameter, torch.Tensor]]:
    """Make every weight that a module gets in a ``with`` block keep only this process's rows.

    A weight is hollow afterwards: it has its shape and type, and no memory. Every process reads every file; RAM holds
    one weight at a time and its sources, as in ``weights_on_disk.py``.

    Args:
        plan: the processes that share the rows, and this one.
        device: the device of its rows.

    Yields:
        By parameter, its rows; filled while the block runs.
    """
    rows: dict[nn.Parameter, torch.Tensor] = {}

    @torch.no_grad()
    def cut(module: nn.Module, name: str, weight: nn.Parameter) -> None:
        # A weight on meta is not loaded yet; one with rows is here under the name it is tied to.
        if weight.is_meta or weight in rows or weight.ndim == 0:
            return
        first, end = rows_of(len(weight), plan.shard_size, plan.shard_index)
        rows[weight] = weight.data[first:end].to(device, copy=True)
        weight.data = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
        return_free_memory()

    with each_weight_moved_by(cut):
        yield rows
