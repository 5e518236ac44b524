"""Gradients of several processes, summed in their own types.

``DistributedDataParallel`` sums each gradient in its weight's type, and refuses one that autograd has summed in
another: up to torch 2.13 its buckets do not know ``Tensor.grad_dtype``. It takes the mean: each loss would have to be
multiplied by the number of processes, and with three processes that factor rounds every 16-bit product again.

Where DDP refuses a model, :class:`GradientSums` sums as it does, bucket by bucket while backward proceeds, and in
place: NCCL runs the all-reduces of a bucket as one launch on its own stream, without a copy of them.
"""

# Without `from __future__ import annotations`: DDP compares the annotations of its hook with classes.
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import distributed as dist
from torch import nn

from lowmem_ft.foundation.errors import UserError

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients from which on they are sent: ``bucket_cap_mb`` of ``DistributedDataParallel``."""


def ddp_takes(model: nn.Module) -> bool:
    """Return whether DDP accepts a model: the gradient of every trained parameter has its weight's type."""
    return all(
        parameter.grad_dtype in (None, parameter.dtype)
        for parameter in model.parameters()
        if parameter.requires_grad
    )


def sum_bucket(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum gradients of parts of one loss over the processes, without division: a communication hook of DDP.

    Costs: the same as DDP's own mean, without its division.

    Args:
        state: unused.
        bucket: gradients that are reduced together.

    Returns:
        A future of their sums.
    """
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def copy_from_main_process(model: nn.Module) -> None:
    """Copy weights and buffers from the main process to all others, as ``DistributedDataParallel`` does."""
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)


def sum_together(tensors: Sequence[torch.Tensor]) -> Callable[[], object]:
    """Begin to sum tensors of one type over all processes, in place, in one collective.

    NCCL's runs on a stream of its own. Gloo copies several tensors into one buffer, on the CPU, until it has ended.

    Returns:
        A call after which work of the current stream finds the sums.
    """
    if len(tensors) == 1:
        work = dist.all_reduce(tensors[0], async_op=True)
        assert work is not None
        return work.wait
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as together:
        for tensor in tensors:
            dist.all_reduce(tensor)
    return together.wait


class GradientSums:
    """Gradients that are replaced by their sums over all processes, in buckets, while backward still computes others.

    A missing gradient counts as zero if another process has one, and stays missing if no process has one. All processes
    send the same buckets in the same order: a bucket that lacks a gradient waits for the end of backward, and those
    after it do, too.

    Frees: nothing; the sums are written over the gradients.
    Costs: gradients that are missing in this process take memory until the sums are there.
    Equals: one all-reduce after another. With three processes or more, gloo and NCCL may add them in another order,
    which depends on a gradient's place in its bucket.
    Source: the buckets of ``DistributedDataParallel`` (Li et al., 2020, arXiv:2006.15704).

    Args:
        takes_mean: whether each loss is multiplied by the number of processes, so that the sums are divided by it;
            else the losses are parts of one.
        sum_together: begins a sum, as :func:`sum_together` does.
    """

    def __init__(
        self,
        *,
        takes_mean: bool = False,
        sum_together: Callable[[Sequence[torch.Tensor]], Callable[[], object]] = sum_together,
    ) -> None:
        self._takes_mean = takes_mean
        self._sum_together = sum_together
        self._window: _Window | None = None

    @contextlib.contextmanager
    def during_backward(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Send each bucket in a block as soon as the block's backward has filled it, and all others at the block's end.

        Args:
            parameters: the same trained parameters, in the same order, in every process. The block's backward is the
                last one before :meth:`finish`.

        Raises:
            UserError: if a parameter gets a second gradient after its bucket was sent.
        """
        if self._window is not None:  # another backward of the same window: of a mean, the mean is the same
            self.finish(())
        window = _Window.of(parameters, self._sum_together)
        hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(window.take, number))
            for number, bucket in enumerate(window.buckets)
            for parameter in bucket
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        window.send_rest()
        self._window = window

    def finish(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let further work wait for the sums; the host waits only in a process in which a gradient was missing.

        Args:
            parameters: those of :meth:`during_backward`. Without one before, their gradients are sent now.
        """
        window, self._window = self._window, None
        if window is None:
            window = _Window.of(parameters, self._sum_together)
            window.send_rest()
        gradients = window.sums()
        if self._takes_mean:
            for gradient in gradients:
                gradient.div_(dist.get_world_size())


@dataclass
class _Window:
    """The gradients of one window of micro-batches on their way to other processes.

    Args:
        buckets: the parameters whose gradients are sent together, in the order of sending.
        sum_together: see :class:`GradientSums`.
        come: for each bucket that is not sent, the parameters whose gradient has come.
        num_sent: the buckets that were sent, from the first on.
        missing: parameters that had no gradient here.
        waits: for each bucket that was sent, the call that waits for its sums.
    """

    buckets: list[list[nn.Parameter]]
    sum_together: Callable[[Sequence[torch.Tensor]], Callable[[], object]]
    come: list[set[nn.Parameter]]
    num_sent: int = 0
    missing: list[nn.Parameter] = field(default_factory=list)
    waits: list[Callable[[], object]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        parameters: Iterable[nn.Parameter],
        sum_together: Callable[[Sequence[torch.Tensor]], Callable[[], object]],
    ) -> "_Window":
        buckets = _buckets_of(parameters)
        return cls(buckets, sum_together, [set() for _ in buckets])

    def take(self, number: int, parameter: nn.Parameter) -> None:
        """Note that a gradient of a bucket has come, and send the buckets whose turn it is."""
        if number < self.num_sent:
            raise UserError(
                "Several processes sum a gradient as soon as it has come, and one came twice in a backward pass, as "
                "with torch.utils.checkpoint(use_reentrant=True) around a shared weight. Set use_reentrant=False, or "
                "train in one process."
            )
        self.come[number].add(parameter)
        while self.num_sent < len(self.buckets) and len(self.come[self.num_sent]) == len(
            self.buckets[self.num_sent]
        ):
            self._send_next()

    def send_rest(self) -> None:
        """Send the other buckets, and then which gradients there were, so that no process waits before its sums."""
        while self.num_sent < len(self.buckets):
            self._send_next()

    def _send_next(self) -> None:
        bucket = self.buckets[self.num_sent]
        self.num_sent += 1
        self.missing += [parameter for parameter in bucket if parameter.grad is None]
        self.waits.append(self.sum_together([_dense_gradient(parameter) for parameter in bucket]))

    def sums(self) -> list[torch.Tensor]:
        """Return the sums that exist in any process, for which the current stream waits."""
        parameters = [parameter for bucket in self.buckets for parameter in bucket]
        if not parameters:
            return []
        missing = set(self.missing)
        is_there = torch.tensor(
            [parameter not in missing for parameter in parameters],
            dtype=torch.int32,
            device=parameters[0].device,
        )
        dist.all_reduce(is_there, op=dist.ReduceOp.MAX)
        for wait in self.waits:
            wait()
        if missing:  # the others know that theirs are there
            for parameter, is_somewhere in zip(parameters, is_there.tolist(), strict=True):
                if not is_somewhere:
                    parameter.grad = None
        return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _buckets_of(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return parameters in buckets of gradients of one type on one device, the last parameters first.

    Backward computes about in this order. A bucket ends with the gradient with which it has :data:`BUCKET_BYTES`.
    """
    full: list[list[nn.Parameter]] = []
    filling: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    num_bytes: dict[tuple[torch.device, torch.dtype], int] = {}
    for parameter in reversed([*parameters]):
        dtype = parameter.grad_dtype or parameter.dtype
        kind = parameter.device, dtype
        filling.setdefault(kind, []).append(parameter)
        num_bytes[kind] = num_bytes.get(kind, 0) + parameter.numel() * dtype.itemsize
        if num_bytes[kind] >= BUCKET_BYTES:
            full.append(filling.pop(kind))
            del num_bytes[kind]
    return [*full, *filling.values()]


def _dense_gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
    elif not parameter.grad.is_contiguous():
        parameter.grad = parameter.grad.contiguous()
    return parameter.grad
