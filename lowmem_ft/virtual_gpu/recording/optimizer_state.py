"""The tensors that an optimizer keeps for its parameters, and whether a trace has seen all of them being made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import SGD, Optimizer

from lowmem_ft.foundation.errors import LostMemoryError
from lowmem_ft.virtual_gpu.calls.fake_results import tensors_in


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors whose memory one uses: itself, or those in a wrapper such as ``DTensor``, however deep."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, Tensor):  # a DTensor also names its mesh
            yield from plain_tensors(inner)


def state_tensors(optimizer: Optimizer) -> Iterator[tuple[Any, Tensor]]:
    """Yield each parameter of an optimizer with each tensor kept for it, those in lists and dicts included."""
    for parameter, state in optimizer.state.items():
        for tensor in tensors_in((state,)):
            yield parameter, tensor


def check_state(optimizer: Optimizer, booked_bytes: Callable[[Tensor], int | None]) -> None:
    """Check that the trace has booked all the state that an optimizer keeps after a step.

    Args:
        optimizer: it has stepped, and its gradients still exist.
        booked_bytes: returns the bytes booked for a tensor's storage; None if the trace does not know it.

    Raises:
        LostMemoryError: if the trace has missed memory of its state, or the state itself.
    """
    name = type(optimizer).__name__
    parts = [part for _, tensor in state_tensors(optimizer) for part in plain_tensors(tensor)]
    kept = {part.untyped_storage()._cdata: part for part in parts if isinstance(part, FakeTensor)}
    missed = sum(
        part.untyped_storage().nbytes()
        for part in kept.values()
        if booked_bytes(part) != part.untyped_storage().nbytes()
    )
    if missed:
        raise LostMemoryError(
            f"{name} holds {missed:,} bytes of state whose allocation the trace did not record, so the estimate would "
            f"be too low. {_REPORT}"
        )
    if not parts and _always_keeps_state(optimizer) and any(_with_gradients(optimizer)):
        raise LostMemoryError(
            f"{name} has stepped and keeps no state in `optimizer.state`, where it always has some, so the numbers of "
            f"the trace would be too low. {_REPORT}"
        )


_REPORT = "This is an error of lowmem_ft and not of your program: please report it with the program and its versions."


def _always_keeps_state(optimizer: Optimizer) -> bool:
    """Return whether it is one of torch's own except SGD, which keeps state with momentum alone; others are unknown."""
    return type(optimizer).__module__.startswith(torch.optim.__name__) and not isinstance(optimizer, SGD)


def _with_gradients(optimizer: Optimizer) -> Iterator[bool]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter.grad is not None and parameter.numel() > 0
