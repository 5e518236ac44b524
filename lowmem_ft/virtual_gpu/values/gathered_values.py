"""Values that a rank gathers: its peers, which do not exist, have the same as it has."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives  # noqa: F401 - registers torch.ops._c10d_functional
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lowmem_ft.virtual_gpu.values.constant_propagation import known_values, set_values

_c10d = torch.ops.c10d
_GATHER, _GATHER_EACH = _c10d._allgather_base_.default, _c10d.allgather_.default
_GATHER_NEW = torch.ops._c10d_functional.all_gather_into_tensor.default


def exchange_values(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Give the tensors of an all-gather the values that each rank has, if this one's are known.

    Sums, maxima and what another rank sends stay this rank's own.

    Args:
        func: an operator of ``torch.distributed`` or FSDP2.
        args: its arguments.
        result: what it returned.

    Returns:
        Whether nothing else is to be found out about its values.
    """
    if func is _GATHER_NEW:
        _repeat(args[0], result)
    elif func is _GATHER:
        _repeat(args[1], args[0])
    elif func is _GATHER_EACH:
        for outputs, own in zip(*args[:2], strict=True):
            for output in outputs:
                _repeat(own, output)
    return func is _GATHER_NEW or func.namespace == "c10d"


def _repeat(own: Tensor, gathered: Tensor) -> None:
    values = known_values(own)
    if values is not None:
        with unset_fake_temporarily():
            times = gathered.numel() // max(1, values.numel())
            values = values.flatten().repeat(times).reshape(gathered.shape)
    set_values(gathered, values)
