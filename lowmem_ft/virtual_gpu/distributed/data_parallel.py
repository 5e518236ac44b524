"""Torch's own ``DistributedDataParallel`` in a trace: its buckets, filled and sent as backward proceeds."""

# No postponed annotations here: DDP compares those of its hook with classes.
import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowmem_ft.memory.category import Category
from lowmem_ft.upstream.patches import wrap

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that are sent together: ``bucket_cap_mb`` of torch's ``DistributedDataParallel``."""


class _With:
    """An object of torch's, which Python cannot change, with another value for an attribute."""

    def __init__(self, inner: Any, name: str, value: Any) -> None:
        self._inner = inner
        setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _assign_buckets(assign: Callable[..., Any], tensors: Any, size_limits: Any, expect_sparse: Any) -> Any:
    """Assign as every later backward does: the first one would put all gradients into one bucket."""
    limits = [torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, BUCKET_BYTES]
    return assign(tensors, limits, expect_sparse)


class TracedDataParallel(DistributedDataParallel):
    """A model whose gradients are summed over ranks that do not exist, as in a run.

    It leaves out the initial broadcast of the first rank's weights, and the first backward's single bucket: buckets are
    those of every later backward. Sums run on a stream of their own, as NCCL's do.

    Args:
        model: a module, wrapped as Accelerate wraps it: with torch's own settings.
        device: the machine's device.
        mark: sets the category of a tensor.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, mark: Callable[[torch.Tensor, Category], None]
    ) -> None:
        with contextlib.ExitStack() as undo:
            wrap(undo, torch.distributed, "_compute_bucket_assignment_by_size", _assign_buckets)
            super().__init__(model, init_sync=False)
        self._mark = mark
        self._streams: Any = None if device.type == "cpu" else torch.get_device_module(device.type)
        self._side: Any = None if self._streams is None else self._streams.Stream()
        # The buckets stay in the order of the parameters: to agree on another, ranks exchange values.
        self.reducer = _With(self.reducer, "_rebuild_buckets", lambda: False)  # type: ignore[assignment]
        # torch has timers for CPUs and CUDA alone, and logs that once a process.
        self.logger = _With(self.logger, "set_runtime_stats_and_log", lambda: None)  # type: ignore[assignment]
        # The fake group's work has no result, which torch's own hook reads.
        self.register_comm_hook(None, self._sum)

    def finish(self) -> None:
        """Let further work wait for the sums, as the end of backward does."""
        if self._streams is not None:
            self._streams.current_stream().wait_stream(self._side)

    def _sum(self, state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        self._mark(buffer, "communication")
        if self._streams is None:
            torch.distributed.all_reduce(buffer)
        else:
            self._side.wait_stream(self._streams.current_stream())
            with self._streams.stream(self._side):
                torch.distributed.all_reduce(buffer)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done
