"""The part of a parameter in this process: all of it, or the shard that ``fully_shard`` or ZeRO-3 has left here.

FSDP2 (``torch.distributed.fsdp.fully_shard``) makes each parameter a ``DTensor``, of which every process holds some
rows, split as by ``torch.chunk``: the last processes may hold fewer, or no rows. DeepSpeed's ZeRO-3 leaves the
parameter empty and attaches a flat part, of the same size in every process, with the last one padded.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a ``DTensor``, without importing its class."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def is_partitioned(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter that ZeRO-3 has partitioned."""
    return hasattr(tensor, "ds_tensor")


def whole_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of a tensor before ZeRO-3 partitioned it; other shards know it themselves."""
    partitioned: Any = tensor
    return partitioned.ds_shape if is_partitioned(tensor) else tensor.shape


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor, detached, in the same memory; any other tensor unchanged."""
    sharded: Any = tensor
    if is_partitioned(tensor):
        part = sharded.ds_tensor.detach()
        before = part.numel() * torch.distributed.get_rank()
        return part[: max(sharded.ds_numel - before, 0)]  # without the padding
    return sharded.detach().to_local() if is_sharded(tensor) else tensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """Gather all of a sharded tensor on its group's device; a collective call. Returns any other tensor unchanged."""
    if is_partitioned(tensor):
        with _zero3().GatheredParameters([tensor]):
            return tensor.detach().clone()
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor.detach()
    return sharded.to(sharded.device_mesh.device_type).full_tensor()


@torch.no_grad()
def set_whole(tensor: Tensor, values: Tensor) -> None:
    """Give a tensor values, or a sharded one its part of them. Every process calls this, with the same values."""
    if is_partitioned(tensor):
        with _zero3().GatheredParameters([tensor], modifier_rank=0):
            tensor.copy_(values)
        return
    here, first = local_part(tensor), first_element(tensor)
    here.copy_(values.flatten()[first : first + here.numel()].view(here.shape))


def _zero3() -> Any:
    return importlib.import_module("deepspeed").zero


def rows_of(num_rows: int, num_parts: int, part: int) -> tuple[int, int]:
    """Return the first row of a part and the one after its last, as ``torch.chunk`` splits them."""
    most = -(-num_rows // num_parts)
    return min(most * part, num_rows), min(most * (part + 1), num_rows)


def first_element(tensor: Tensor) -> int:
    """Return the index, in the whole flattened tensor, of this process's first element.

    Args:
        tensor: a parameter or a gradient, sharded or not.

    Raises:
        ValueError: if it is not sharded as FSDP2 does it: by rows, over one dimension of the mesh.
    """
    if not is_sharded(tensor):
        return 0
    dimension = _sharded_dimension(tensor)
    if dimension is None or not tensor.ndim:
        return 0
    sharded: Any = tensor
    num_rows, mesh = tensor.shape[0], sharded.device_mesh
    first_row, _ = rows_of(num_rows, mesh.size(dimension), mesh.get_local_rank(dimension))
    return first_row * (tensor.numel() // max(num_rows, 1))


def parts_of(tensor: Tensor) -> list[int]:
    """Return the number of a tensor's elements in each process, in order; for a whole tensor, one number.

    Raises:
        ValueError: as in :func:`first_element`.
    """
    dimension = _sharded_dimension(tensor) if is_sharded(tensor) and tensor.ndim else None
    if dimension is None:
        return [tensor.numel()]
    sharded: Any = tensor
    num_rows, num_parts = tensor.shape[0], sharded.device_mesh.size(dimension)
    bounds = [rows_of(num_rows, num_parts, part) for part in range(num_parts)]
    row = tensor.numel() // max(num_rows, 1)
    return [(end - first) * row for first, end in bounds]


def part_number(tensor: Tensor) -> int:
    """Return the index in :func:`parts_of` of this process's part."""
    dimension = _sharded_dimension(tensor) if is_sharded(tensor) and tensor.ndim else None
    if dimension is None:
        return 0
    sharded: Any = tensor
    return sharded.device_mesh.get_local_rank(dimension)


def is_held_once(tensor: Tensor) -> bool:
    """Return whether each element is stored in only one process."""
    return is_sharded(tensor) and tensor.ndim > 0 and _sharded_dimension(tensor) is not None


def sum_over_shards(value: Tensor, of: Tensor) -> Tensor:
    """Sum a value, computed by each process from its part of a tensor, over the processes that share the tensor.

    Args:
        value: this process's value; changed in place.
        of: the tensor.

    Returns:
        ``value``, which now holds the sum.

    Raises:
        ValueError: as in :func:`first_element`.
    """
    dimension = _sharded_dimension(of) if is_sharded(of) else None
    if dimension is not None:
        mesh: Any = of.device_mesh  # type: ignore[attr-defined]
        there = value.to(mesh.device_type)  # shards may be on the host, from which the group cannot send
        torch.distributed.all_reduce(there, group=mesh.get_group(dimension))
        value.copy_(there)
    return value


def _sharded_dimension(tensor: Any) -> int | None:
    """Return the dimension of the mesh over which rows are split; None if every process has all of them."""
    sharded = [number for number, place in enumerate(tensor.placements) if not place.is_replicate()]
    if not sharded:
        return None
    if len(sharded) > 1 or not tensor.placements[sharded[0]].is_shard(0):
        raise ValueError(
            "Our optimizers update parameters that are whole, or sharded by rows over one dimension of the mesh as "
            f"fully_shard does; got {tuple(tensor.placements)}. Shard with fully_shard's own placement, Shard(0)."
        )
    return sharded[0]
