"""Gradients of several processes, summed in their own types.

``DistributedDataParallel`` sums each gradient in its weight's type, and refuses one that autograd has summed in
another. It takes the mean: each loss would have to be multiplied by the number of processes, and with three processes
that factor rounds every 16-bit product again.
"""

# Without `from __future__ import annotations`: DDP compares the annotations of its hook with classes.
from collections.abc import Iterable

import torch
from torch import distributed as dist
from torch import nn


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


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace each gradient by its mean over all processes, for losses that are multiplied by their number.

    Equals: the gradients of ``DistributedDataParallel``, in the gradients' types instead of the weights'.
    In all else it is like :func:`sum_gradients`.
    """
    for gradient in sum_gradients(parameters):
        gradient.div_(dist.get_world_size())


def sum_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Replace each gradient by its sum over all processes, for losses that are parts of one.

    A missing gradient counts as zero if another process has one, and stays missing if no process has one.
    Costs: no memory; the sums begin when backward has ended and do not overlap with it.

    Args:
        parameters: the same parameters, in the same order, in every process.

    Returns:
        The gradients that exist in any process.
    """
    parameters = list(parameters)
    is_there = torch.tensor(
        [parameter.grad is not None for parameter in parameters],
        dtype=torch.int32,
        device=parameters[0].device,
    )
    dist.all_reduce(is_there, op=dist.ReduceOp.MAX)
    gradients = [
        _dense_gradient(parameter)
        for parameter, is_somewhere in zip(parameters, is_there.tolist(), strict=True)
        if is_somewhere
    ]
    for sum_over_processes in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
        assert sum_over_processes is not None
        sum_over_processes.wait()
    return gradients


def _dense_gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
    elif not parameter.grad.is_contiguous():
        parameter.grad = parameter.grad.contiguous()
    return parameter.grad
