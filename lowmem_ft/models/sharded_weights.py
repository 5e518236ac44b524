"""Loading a model of which each process keeps its own rows, so that none holds the whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lowmem_ft.models.mapped_weights import one_after_the_other
from lowmem_ft.system.malloc import return_free_memory
from lowmem_ft.tensors.local_shards import rows_of


@contextlib.contextmanager
def weights_in_shards(
    num_processes: int, process_index: int, device: torch.device
) -> Iterator[dict[nn.Parameter, torch.Tensor]]:
    """Lets every weight that a module gets in a block keep this process's rows alone.

    A weight is hollow afterwards: it has its shape and type, and no memory. Every
    process reads every file; what is in RAM at a time is one weight and what it is made from, as in
    ``mapped_weights.py``.

    Args:
        num_processes: among which rows are dealt out.
        process_index: of this process.
        device: where its rows go.

    Yields:
        By parameter, its rows; filled while the block runs.
    """
    rows: dict[nn.Parameter, torch.Tensor] = {}

    @torch.no_grad()
    def cut(module: nn.Module, name: str, weight: nn.Parameter) -> None:
        # What is on meta is yet to come; what has rows is here by the name it is tied to.
        if weight.is_meta or weight in rows or weight.ndim == 0:
            return
        first, end = rows_of(len(weight), num_processes, process_index)
        rows[weight] = weight.data[first:end].to(device, copy=True)
        weight.data = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
        return_free_memory()

    with one_after_the_other():
        hook = register_module_parameter_registration_hook(cut)
        try:
            yield rows
        finally:
            hook.remove()
