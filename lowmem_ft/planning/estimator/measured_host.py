"""Measurement of what an operator, a further kernel and a Triton launch cost the host, in a few seconds.

A step's kernels are counted by a trace; the host's seconds of a step are these counts times the costs measured here.
"""

from __future__ import annotations

import datetime
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from lowmem_ft.foundation.catalog.clock_rates import reference_host
from lowmem_ft.foundation.catalog.this_host import HostCosts
from lowmem_ft.foundation.devices import kernels_of, name_of
from lowmem_ft.optimizers import OPTIMIZERS, ChunkedOptimizer
from lowmem_ft.virtual_gpu.costs.flops import is_free

NUM_LAYERS, WIDTH, TOKENS = 16, 16, 8
"""A model whose kernels end long before the host has issued the next one."""

_LEAST_STEPS = 3
_JOINED = 9
_PARAMETERS = 64


class KernelCount(TorchDispatchMode):
    """A count of operators that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kernels += not is_free(func)
        return func(*args, **kwargs or {})


def tiny_llama() -> Any:
    """Return a Llama of 16 narrow layers, in bfloat16, in training mode."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(torch.bfloat16).train()


def measure_host(
    device: torch.device, *, seconds: float = 5.0, on_step: Callable[[float], None] = lambda share: None
) -> HostCosts:
    """Return the costs of this machine's host with a device, the least of many repetitions each.

    Args:
        device: on a CPU, an operator's time has its computation in it, and no launch.
        seconds: time for the steps of a small model; the rest takes less than a second.
        on_step: called after each step with the share of the time that has passed.
    """
    operator = _operator_seconds(device, seconds, on_step)
    launch = _launch_seconds(device)
    triton = reference_host()["triton_launch"]
    if kernels_of(device) == "cuda" and (updated := _update_seconds(device)) is not None:
        triton = max(0.0, updated / operator - 1)
    return HostCosts(
        gpu=name_of(device),
        operator_seconds=operator,
        launch_seconds=launch,
        triton_launch=triton,
        date=str(datetime.date.today()),
    )


def _operator_seconds(device: torch.device, seconds: float, on_step: Callable[[float], None]) -> float:
    model, ids = tiny_llama().to(device), torch.zeros(1, TOKENS, dtype=torch.long, device=device)

    def step() -> float:
        """Take one, and return the seconds until all of it was issued."""
        _wait_for(device)
        begin = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return time.perf_counter() - begin

    step()
    with KernelCount() as count:
        step()
    begin, found = time.perf_counter(), []
    while len(found) < _LEAST_STEPS or time.perf_counter() - begin < seconds:
        found.append(step())
        on_step(min(1.0, (time.perf_counter() - begin) / seconds) if seconds else 1.0)
    return min(found) / count.kernels


def _launch_seconds(device: torch.device) -> float:
    """Return the seconds for each further kernel of an operator: joining tensors of many axes copies each."""
    shape = (1,) * 6

    def issued(num_tensors: int) -> float:
        tensors = [torch.zeros(shape, device=device) for _ in range(num_tensors)]
        _wait_for(device)
        return min(timeit.repeat(lambda: torch.cat(tensors), number=20, repeat=20)) / 20

    return max(0.0, issued(_JOINED) - issued(1)) / (_JOINED - 1)


def _update_seconds(device: torch.device) -> float | None:
    """Return the host's seconds for an update of a small parameter by our Triton kernel; None: it is not taken here."""
    parameters = [
        nn.Parameter(torch.zeros(256, dtype=torch.bfloat16, device=device)) for _ in range(_PARAMETERS)
    ]
    row = OPTIMIZERS["adamw"]
    values = {"lr": 1e-3, "weight_decay": 0.0, **row.hyperparameters}
    optimizer = ChunkedOptimizer(parameters, row.update_rule(), values, state="8bit", master="split16")
    if not optimizer.may_use_kernel(parameters[0].device):
        return None
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # compiles
    _wait_for(device)
    return (
        min(timeit.repeat(optimizer.step, setup=lambda: _wait_for(device), number=1, repeat=20)) / _PARAMETERS
    )


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
