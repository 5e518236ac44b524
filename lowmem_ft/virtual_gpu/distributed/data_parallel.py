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
from lowmem_ft.upstream.patches import existing, replace

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that are sent together: ``bucket_cap_mb`` of torch's ``DistributedDataParallel``."""


class _KeepingBuckets:
    """A reducer that keeps its buckets in the order of the parameters: to agree on another, ranks exchange values."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


class _WithoutTimes:
    """A logger without timers: torch has them for CPUs and CUDA alone, and logs that once a process."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def set_runtime_stats_and_log(self) -> None:
        """Return at once."""


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
            # The first backward would put all gradients into one bucket.
            assign = existing(torch.distributed, "_compute_bucket_assignment_by_size")
            limits = [torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, BUCKET_BYTES]
            replace(
                undo,
                torch.distributed,
                "_compute_bucket_assignment_by_size",
                lambda tensors, size_limits, expect_sparse: assign(tensors, limits, expect_sparse),
            )
            super().__init__(model, init_sync=False)
        self._mark = mark
        self._streams: Any = None if device.type == "cpu" else torch.get_device_module(device.type)
        self._side: Any = None if self._streams is None else self._streams.Stream()
        self.reducer = _KeepingBuckets(self.reducer)  # type: ignore[assignment]
        self.logger = _WithoutTimes(self.logger)  # type: ignore[assignment]
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
