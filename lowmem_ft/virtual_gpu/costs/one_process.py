"""Process groups of a traced process: one rank with simulated peers, or groups of one; collectives cost no time."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed
from torch import Tensor
from torch.distributed import HashStore, distributed_c10d

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.category import Category
from lowmem_ft.foundation.upstream.patches import wrap
from lowmem_ft.virtual_gpu.costs.data_parallel import data_parallel_of_one


@contextlib.contextmanager
def one_of_several(num_processes: int, process_index: int) -> Iterator[None]:
    """Let ``torch.distributed`` treat this process as one of several ranks in a block.

    Args:
        num_processes: the number of ranks; with 1, nothing is done.
        process_index: the rank of this process.

    Raises:
        UserError: if this process is in a process group already.
    """
    if num_processes == 1:
        yield
        return
    if torch.distributed.is_initialized():
        raise UserError(
            f"A trace of one of {num_processes} processes simulates a process group, but this process is already in "
            "one. Estimate before torch.distributed.init_process_group, or in a process that was not launched with "
            "others."
        )
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

    excepthook = sys.excepthook  # torch's own puts the rank before every later error
    torch.distributed.init_process_group(
        "fake", rank=process_index, world_size=num_processes, store=HashStore()
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        sys.excepthook = excepthook


def process_groups_of_one(
    undo: contextlib.ExitStack, mark: Callable[[Tensor, Category], None], say: Callable[[str], None]
) -> None:
    """Let a program join process groups of which it is the only member, until a stack is undone.

    NCCL is not needed for that, nor are the variables that ``torchrun`` sets. Groups of :func:`one_of_several` are left
    alone.

    Args:
        undo: undoes it.
        mark: sets the category of a tensor.
        say: called with what is left out.
    """
    backends: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def make_group(
        make: Callable[..., Any], size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if backend == "fake":
            return make(size, rank, ranks, backend, *args, **kwargs)
        if size > 1:
            raise _too_many(size)
        from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

        kwargs = {name: value for name, value in kwargs.items() if name not in _OF_NCCL}
        made = make(size, rank, ranks, "fake", *args, **kwargs)
        backends[made[0]] = backend
        return made

    def get_backend(get: Callable[..., str], group: Any = None) -> str:
        return backends.get(group or distributed_c10d.group.WORLD) or get(group)

    if not torch.distributed.is_initialized():
        undo.callback(_leave, sys.excepthook)
    wrap(undo, distributed_c10d, "rendezvous", _meet_nobody)
    wrap(undo, distributed_c10d, "_new_process_group_helper", make_group)
    for module in (torch.distributed, distributed_c10d):
        wrap(undo, module, "init_process_group", _without_device)
        wrap(undo, module, "get_backend", get_backend)
        wrap(undo, module, "is_nccl_available", lambda is_available: True)
        for name, exchange in _EXCHANGES_OF_OBJECTS.items():
            wrap(undo, module, name, exchange)
    data_parallel_of_one(undo, mark, say)


def _without_device(join: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Join without the device that NCCL would be bound to: torch knows the virtual one by another name."""
    join(*args, **{name: value for name, value in kwargs.items() if name != "device_id"})


def _leave(excepthook: Any) -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.excepthook = excepthook  # torch's own puts the rank before every later error


def _too_many(size: int) -> UserError:
    return UserError(
        f"A virtual GPU is one GPU of one process, got a process group of {size}. Let the program join a group of one "
        "(WORLD_SIZE=1), or estimate a recipe with --num-processes."
    )


def _meet_nobody(
    rendezvous: object, url: str, rank: int = -1, world_size: int = -1, **kwargs: Any
) -> Iterator[tuple[HashStore, int, int]]:
    """Replace the rendezvous at an address, in which ``env://`` takes what a launcher has set."""
    size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE") or 1)
    if size > 1:
        raise _too_many(size)
    yield HashStore(), 0, 1


def _gather_object(gather: Callable[..., None], object_list: list[Any], obj: Any, group: Any = None) -> None:
    if torch.distributed.get_world_size(group) > 1:
        gather(object_list, obj, group)
    else:
        object_list[0] = obj


def _gather_object_at_one(
    gather: Callable[..., None],
    obj: Any,
    object_gather_list: list[Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    if object_gather_list is not None:
        object_gather_list[0] = obj


def _scatter_objects(
    scatter: Callable[..., None], out: list[Any], objects: list[Any] | None = None, *args: Any, **kwargs: Any
) -> None:
    if objects is not None:
        out[0] = objects[0]


def _broadcast_objects(
    broadcast: Callable[..., None], object_list: list[Any], *args: Any, **kwargs: Any
) -> None:
    """Leave what the only process has sent."""


_OF_NCCL = ("backend_options", "device_id")
"""Arguments for a new group's backend."""

_EXCHANGES_OF_OBJECTS = {
    "all_gather_object": _gather_object,
    "gather_object": _gather_object_at_one,
    "scatter_object_list": _scatter_objects,
    "broadcast_object_list": _broadcast_objects,
}
"""Functions that send pickled objects as tensors, whose values a trace would not have."""
