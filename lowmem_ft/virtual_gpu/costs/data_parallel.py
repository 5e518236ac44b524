"""Torch's own ``DistributedDataParallel`` in a trace: its buckets, filled and sent as backward proceeds."""

# No postponed annotations here: DDP compares those of its hook with classes.
import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel, distributed

from lowmem_ft.foundation.memory.category import Category
from lowmem_ft.foundation.upstream.patches import replace, wrap

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that are sent together: ``bucket_cap_mb`` of torch's ``DistributedDataParallel``."""


class _With:
    """An object of torch's, which Python cannot change, with another value for an attribute."""

    def __init__(self, inner: Any, name: str, value: Any) -> None:
        self._inner = inner
        setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _wrap_for_trace(
    init: Callable[..., None], ddp: Any, *args: Any, sends_weights: bool = False, **kwargs: Any
) -> None:
    """Initialise a ``DistributedDataParallel`` so that it works without values.

    It leaves out the first backward's single bucket, as buckets are those of every later backward; and, unless it
    ``sends_weights``, the initial broadcast of the first rank's weights, which frees its memory again.
    """
    cap_mb = kwargs.get("bucket_cap_mb")
    cap_bytes = BUCKET_BYTES if cap_mb is None else int(cap_mb * 2**20)

    def assign(assign: Callable[..., Any], tensors: Any, size_limits: Any, expect_sparse: Any) -> Any:
        limits = (
            [torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, BUCKET_BYTES] if cap_mb is None else [cap_bytes]
        )
        return assign(tensors, limits, expect_sparse)

    kwargs["init_sync"] = sends_weights and kwargs.get("init_sync", True)
    finds_unused, is_static = kwargs.pop("find_unused_parameters", False), kwargs.pop("static_graph", False)
    with contextlib.ExitStack() as undo:
        wrap(undo, torch.distributed, "_compute_bucket_assignment_by_size", assign)
        # Ranks compare shapes by values; here all have the same.
        replace(undo, distributed, "_verify_param_shape_across_processes", lambda group, parameters: None)
        init(ddp, *args, **kwargs)
    # The buckets stay in the order of the parameters: to agree on another, ranks exchange values.
    ddp.reducer = _With(ddp.reducer, "_rebuild_buckets", lambda: False)
    ddp.find_unused_parameters = finds_unused and not is_static  # which copies each output
    if (
        finds_unused or is_static
    ):  # torch's own way to know which weights were used compares addresses of memory
        ddp.reducer = _With(ddp.reducer, "prepare_for_backward", partial(_prepare_anew, ddp.reducer))
    # torch has timers for CPUs and CUDA alone, and logs that once a process.
    ddp.logger = _With(ddp.logger, "set_runtime_stats_and_log", lambda: None)


def _prepare_anew(reducer: Any, outputs: list[torch.Tensor]) -> None:
    """Prepare for a backward pass, whether or not the one before has reached every weight."""
    reducer._reset_state()
    reducer.prepare_for_backward([])


def virtual_data_parallel(
    undo: contextlib.ExitStack, mark: Callable[[torch.Tensor, Category], None], say: Callable[[str], None]
) -> None:
    """Let a program wrap models in ``DistributedDataParallel`` without other processes, until a stack is undone.

    Gradients are copied into buckets and back as ever, and summed on a stream of their own.

    Args:
        undo: undoes it.
        mark: sets the category of a tensor.
        say: called when a hook of the program's own for sums is left out.
    """
    adapted: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    def sum_of_one(state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        mark(bucket.buffer(), "communication")
        return _done(bucket.buffer())

    def init(init: Callable[..., None], ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        if not torch.distributed.is_initialized() or isinstance(ddp, TracedDataParallel):
            init(ddp, *args, **kwargs)
            return
        num_ranks = torch.distributed.get_world_size(kwargs.get("process_group"))
        _wrap_for_trace(init, ddp, *args, sends_weights=num_ranks > 1, **kwargs)
        sum_up = sum_of_one
        if num_ranks > 1:
            sums = Sums(next(ddp.parameters()).device, mark, ddp.process_group)
            sum_up = sums.of_bucket_in_backward
        DistributedDataParallel.register_comm_hook(ddp, None, sum_up)
        adapted.add(ddp)

    def register(
        register: Callable[..., None], ddp: DistributedDataParallel, *args: Any, **kwargs: Any
    ) -> None:
        if ddp not in adapted:
            register(ddp, *args, **kwargs)
            return
        alone = torch.distributed.get_world_size(ddp.process_group) == 1
        why = ", as there is one process" if alone else ""
        say(f"DistributedDataParallel: the script's communication hook is left out{why}")

    wrap(undo, DistributedDataParallel, "register_comm_hook", register)
    wrap(undo, DistributedDataParallel, "__init__", init)


class Sums:
    """Sums of buckets over the ranks of a group, on a stream of their own, as NCCL's are.

    The fake group's work has no result, which torch's own hook reads.

    Args:
        device: the device of the gradients.
        mark: sets the category of a tensor.
        group: the ranks; None: all.
    """

    def __init__(
        self, device: torch.device, mark: Callable[[torch.Tensor, Category], None], group: Any = None
    ) -> None:
        self._mark = mark
        self._group = group
        self._streams: Any = None if device.type == "cpu" else torch.get_device_module(device.type)
        self._side: Any = None if self._streams is None else self._streams.Stream()

    def of_bucket(
        self, state: object, bucket: torch.distributed.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Sum a bucket, for which further work does not wait."""
        buffer = bucket.buffer()
        self._mark(buffer, "communication")
        self.beside(lambda: torch.distributed.all_reduce(buffer, group=self._group))
        return _done(buffer)

    def beside(self, begin: Callable[[], object]) -> Callable[[], None]:
        """Begin a sum for which further work does not wait, and return the call after which it does."""
        if self._streams is None:
            begin()
        else:
            self._side.wait_stream(self._streams.current_stream())
            with self._streams.stream(self._side):
                begin()
        return self.wait

    def of_bucket_in_backward(
        self, state: object, bucket: torch.distributed.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Sum a bucket; at the end of backward all of them are there, before torch copies them to the gradients."""
        future = self.of_bucket(state, bucket)
        if bucket.is_last():
            torch.autograd.Variable._execution_engine.queue_callback(self.wait)
        return future

    def wait(self) -> None:
        """Let further work wait for the sums."""
        if self._streams is not None:
            self._streams.current_stream().wait_stream(self._side)


def _done(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


class TracedDataParallel(DistributedDataParallel):
    """A model whose gradients are summed over ranks that do not exist, as in a run.

    Sums run on a stream of their own, as NCCL's do.

    Args:
        model: a module, wrapped as Accelerate wraps it: with torch's own settings.
        device: the machine's device.
        mark: sets the category of a tensor.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, mark: Callable[[torch.Tensor, Category], None]
    ) -> None:
        _wrap_for_trace(DistributedDataParallel.__init__, self, model)
        sums = Sums(device, mark)
        self.finish = sums.wait
        """Lets further work wait for the sums, as the end of backward does."""
        self.register_comm_hook(None, sums.of_bucket)
