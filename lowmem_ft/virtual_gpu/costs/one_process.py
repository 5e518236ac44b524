"""Process groups of a traced process, whose peers are simulated: none of them exists, and each does what it does."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed
from torch import Tensor
from torch.distributed import HashStore, distributed_c10d

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.category import Category
from lowmem_ft.foundation.upstream.patches import wrap
from lowmem_ft.virtual_gpu.costs.data_parallel import virtual_data_parallel


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


class Peers:
    """The ranks of a traced program, all on one machine, of which this process is one.

    Peers have tensors and objects like its own. Objects that the first rank sends are kept, for a trace of another.

    Args:
        num_processes: the number of ranks.
        process_index: the rank of this process.
        sent: objects that a trace of the first rank has sent, in order; None: this is the first.
    """

    def __init__(self, num_processes: int = 1, process_index: int = 0, sent: Sequence[Any] = ()) -> None:
        self.num_processes = num_processes
        self.process_index = process_index
        self.sent: list[Any] = []
        self._to_receive = iter(sent)

    def send(self, value: Any) -> Any:
        """Return what the first rank sends at this point of the program: the value, if this is the first."""
        if self.process_index:
            return copy.deepcopy(next(self._to_receive, value))
        self.sent.append(value)
        return value


def virtual_process_groups(
    undo: contextlib.ExitStack,
    peers: Peers,
    mark: Callable[[Tensor, Category], None],
    say: Callable[[str], None],
) -> None:
    """Let a program join process groups without other processes, until a stack is undone.

    NCCL is not needed for that, nor are the variables that ``torchrun`` sets. Groups of :func:`one_of_several` are left
    alone.

    Args:
        undo: undoes it.
        peers: the ranks of the program, which a group of its may have at the most.
        mark: sets the category of a tensor.
        say: called with what is left out.
    """
    backends: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def make_group(
        make: Callable[..., Any], size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if backend == "fake":
            return make(size, rank, ranks, backend, *args, **kwargs)
        _check_size(size, peers)
        from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

        kwargs = {name: value for name, value in kwargs.items() if name not in _OF_NCCL}
        made = make(size, rank, ranks, "fake", *args, **kwargs)
        if made[0] != distributed_c10d.GroupMember.NON_GROUP_MEMBER:
            backends[made[0]] = backend
        return made

    def get_backend(get: Callable[..., str], group: Any = None) -> str:
        return backends.get(group or distributed_c10d.group.WORLD) or get(group)

    if not torch.distributed.is_initialized():
        undo.callback(_leave, sys.excepthook)
    wrap(undo, distributed_c10d, "rendezvous", functools.partial(_meet_nobody, peers))
    wrap(undo, distributed_c10d, "_new_process_group_helper", make_group)
    exchanges = {
        "all_gather_object": _gather_object,
        "gather_object": _gather_object_at_one,
        "scatter_object_list": functools.partial(_scatter_objects, peers),
        "broadcast_object_list": functools.partial(_broadcast_objects, peers),
    }
    for module in (torch.distributed, distributed_c10d):
        wrap(undo, module, "init_process_group", _without_device)
        wrap(undo, module, "get_backend", get_backend)
        wrap(undo, module, "is_nccl_available", lambda is_available: True)
        for name, exchange in exchanges.items():
            wrap(undo, module, name, exchange)
    virtual_data_parallel(undo, mark, say)


def _without_device(join: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Join without the device that NCCL would be bound to: torch knows the virtual one by another name."""
    join(*args, **{name: value for name, value in kwargs.items() if name != "device_id"})


def _leave(excepthook: Any) -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.excepthook = excepthook  # torch's own puts the rank before every later error


def _check_size(size: int, peers: Peers) -> None:
    if size <= peers.num_processes:
        return
    if peers.num_processes == 1:
        raise UserError(
            f"A virtual GPU is one GPU of one process, got a process group of {size}. Let the program join a group of "
            f"one (WORLD_SIZE=1), or estimate it on as many: lowmem-ft estimate --script FILE --gpu {size}xNAME."
        )
    raise UserError(
        f"There are {peers.num_processes} GPUs with one process each, got a process group of {size}. Let the program "
        "ask for as many as it is started with (WORLD_SIZE), or name more GPUs."
    )


def _meet_nobody(
    peers: Peers, rendezvous: object, url: str, rank: int = -1, world_size: int = -1, **kwargs: Any
) -> Iterator[tuple[HashStore, int, int]]:
    """Replace the rendezvous at an address, in which ``env://`` takes what a launcher has set."""
    size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE") or 1)
    _check_size(size, peers)
    yield HashStore(), peers.process_index if size > 1 else 0, size


def _gather_object(gather: object, object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj, *(copy.deepcopy(obj) for _ in object_list[1:])]


def _gather_object_at_one(
    gather: object, obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any
) -> None:
    if object_gather_list is not None:
        _gather_object(gather, object_gather_list, obj)


def _scatter_objects(
    peers: Peers,
    scatter: object,
    out: list[Any],
    objects: list[Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    sent = peers.send(objects)
    if sent is not None:
        out[0] = sent[peers.process_index]


def _broadcast_objects(
    peers: Peers, broadcast: object, object_list: list[Any], *args: Any, **kwargs: Any
) -> None:
    object_list[:] = peers.send([*object_list])


_OF_NCCL = ("backend_options", "device_id")
"""Arguments for a new group's backend."""
