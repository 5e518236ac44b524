"""Gradients of several processes, summed in the types that they have.

``DistributedDataParallel`` sums each in its weight's type, and refuses one that autograd has summed in another.
It takes their mean: each loss would have to be taken times the number of processes, and times three every 16-bit
product is rounded anew.
"""

# No annotations as text here: DDP compares those of its hook with classes.
from collections.abc import Iterable

import torch
from torch import distributed as dist
from torch import nn


def ddp_takes(model: nn.Module) -> bool:
    """Whether the gradient of every trained parameter has its weight's type."""
    return all(
        parameter.grad_dtype in (None, parameter.dtype)
        for parameter in model.parameters()
        if parameter.requires_grad
    )


def sum_bucket(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook for gradients of parts of one loss: summed over the processes, and divided by nothing.

    Costs: as DDP's own mean does, without its division.

    Args:
        state: none.
        bucket: gradients that go together.

    Returns:
        Their sums, once they are there.
    """
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def copy_from_main_process(model: nn.Module) -> None:
    """Begin with the same weights and buffers in all processes, as ``DistributedDataParallel`` does."""
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace each gradient by its mean over all processes, for losses that each took times their number.

    Equals: what ``DistributedDataParallel`` leaves behind, in the gradients' types instead of the weights'.
    Else as :func:`sum_gradients`.
    """
    for gradient in sum_gradients(parameters):
        gradient.div_(dist.get_world_size())


def sum_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Replace each gradient by its sum over all processes, for losses that are parts of one.

    A parameter without a gradient counts as zero where another process has one, and stays without where none has.
    Costs: no memory; the sums begin when backward has ended, not beside it.

    Args:
        parameters: the same ones, in the same order, in every process.

    Returns:
        The gradients that there are.
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
