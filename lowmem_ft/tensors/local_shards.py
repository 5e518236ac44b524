"""What of a parameter lies in this process: all of it, or what ``fully_shard`` or ZeRO-3 has left here.

FSDP2 (``torch.distributed.fsdp.fully_shard``) makes each parameter a ``DTensor``, of which every process holds some
rows, as ``torch.chunk`` cuts them: the last processes may hold fewer, or none. DeepSpeed's ZeRO-3 leaves a parameter
empty, and a flat part of it beside it, in every process of the same size, the last filled up.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a ``DTensor``; asked without importing what it is made of."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def is_partitioned(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter that ZeRO-3 has cut."""
    return hasattr(tensor, "ds_tensor")


def whole_shape(tensor: Tensor) -> torch.Size:
    """The shape of a tensor before ZeRO-3 has cut it; other shards know it by themselves."""
    partitioned: Any = tensor
    return partitioned.ds_shape if is_partitioned(tensor) else tensor.shape


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor, without its graph, in the same memory; any other tensor itself."""
    sharded: Any = tensor
    if is_partitioned(tensor):
        part = sharded.ds_tensor.detach()
        before = part.numel() * torch.distributed.get_rank()
        return part[: max(sharded.ds_numel - before, 0)]  # what fills it up has no values
    return sharded.detach().to_local() if is_sharded(tensor) else tensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, where its processes meet; every one of them calls this. Any other tensor itself."""
    if is_partitioned(tensor):
        with _zero3().GatheredParameters([tensor]):
            return tensor.detach().clone()
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor.detach()
    return sharded.to(sharded.device_mesh.device_type).full_tensor()


@torch.no_grad()
def set_whole(tensor: Tensor, values: Tensor) -> None:
    """Give a tensor values; of a sharded one, this process's part. Every process calls this, with the same values."""
    if is_partitioned(tensor):
        with _zero3().GatheredParameters([tensor], modifier_rank=0):
            tensor.copy_(values)
        return
    here, first = local_part(tensor), first_element(tensor)
    here.copy_(values.flatten()[first : first + here.numel()].view(here.shape))


def _zero3() -> Any:
    return importlib.import_module("deepspeed").zero


def local_memory(tensor: Tensor) -> torch.UntypedStorage:
    """Where this process's part of a sharded tensor lies, or all of another; no operator runs."""
    if not is_sharded(tensor):
        return tensor.untyped_storage()
    sharded: Any = tensor
    with torch.no_grad():
        return sharded.to_local().untyped_storage()


def rows_of(num_rows: int, num_processes: int, process_index: int) -> tuple[int, int]:
    """The first row of a process, and the one after its last, as ``torch.chunk`` deals them out."""
    most = -(-num_rows // num_processes)
    return min(most * process_index, num_rows), min(most * (process_index + 1), num_rows)


def first_element(tensor: Tensor) -> int:
    """The number, in the whole flattened tensor, of this process's first element.

    Args:
        tensor: a parameter or a gradient, sharded or not.

    Raises:
        ValueError: if it is cut otherwise than FSDP2 cuts: by rows, over one dimension of the mesh.
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
    """How many elements of a tensor each process holds, in their order; of one that is whole, all in one.

    Raises:
        ValueError: as in :func:`first_element`.
    """
    dimension = _sharded_dimension(tensor) if is_sharded(tensor) and tensor.ndim else None
    if dimension is None:
        return [tensor.numel()]
    sharded: Any = tensor
    num_rows, num_processes = tensor.shape[0], sharded.device_mesh.size(dimension)
    bounds = [rows_of(num_rows, num_processes, process) for process in range(num_processes)]
    row = tensor.numel() // max(num_rows, 1)
    return [(end - first) * row for first, end in bounds]


def part_number(tensor: Tensor) -> int:
    """Which of :func:`parts_of` lies in this process."""
    dimension = _sharded_dimension(tensor) if is_sharded(tensor) and tensor.ndim else None
    if dimension is None:
        return 0
    sharded: Any = tensor
    return sharded.device_mesh.get_local_rank(dimension)


def is_held_once(tensor: Tensor) -> bool:
    """Whether each element lies in one process alone."""
    return is_sharded(tensor) and tensor.ndim > 0 and _sharded_dimension(tensor) is not None


def sum_over_shards(value: Tensor, of: Tensor) -> Tensor:
    """The sum, over the processes among which a tensor is cut, of a value that each has made of its part.

    Args:
        value: of this process; changed in place.
        of: the tensor.

    Returns:
        The value.

    Raises:
        ValueError: as in :func:`first_element`.
    """
    dimension = _sharded_dimension(of) if is_sharded(of) else None
    if dimension is not None:
        import torch.distributed

        mesh: Any = of.device_mesh  # type: ignore[attr-defined]
        there = value.to(mesh.device_type)  # shards may wait on the host, where the group cannot send from
        torch.distributed.all_reduce(there, group=mesh.get_group(dimension))
        value.copy_(there)
    return value


def _sharded_dimension(tensor: Any) -> int | None:
    """The dimension of the mesh along which rows are dealt out; None if every process has all of them."""
    sharded = [number for number, place in enumerate(tensor.placements) if not place.is_replicate()]
    if not sharded:
        return None
    if len(sharded) > 1 or not tensor.placements[sharded[0]].is_shard(0):
        raise ValueError(
            "Our optimizers update parameters that are whole, or cut by rows over one dimension of the mesh as "
            f"fully_shard does; got {tuple(tensor.placements)}. Shard with fully_shard's own placement, Shard(0)."
        )
    return sharded[0]
