"""Measurement of what an operator, a further kernel and a Triton launch cost the host, in a few seconds.

A step's kernels are counted by a trace; the host's seconds of a step are these counts times the costs measured here.
``scripts/calibrate counts`` compares such products with the host's time for layers of several kinds.
"""

from __future__ import annotations

import datetime
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from lowmem_ft.foundation.catalog.clock_rates import reference_host
from lowmem_ft.foundation.catalog.this_host import HostCosts
from lowmem_ft.foundation.devices import name_of
from lowmem_ft.techniques.kernels.fused_operators import enable_fused_operators
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

NUM_LAYERS, WIDTH, TOKENS = 16, 16, 8
"""A model whose kernels end long before the host has issued the next one.

On a CPU its products are too small for oneDNN, which takes longer to prepare one than an operator takes.
"""

_LEAST_PASSES = 3
_JOINED = 9

Model = Any


@dataclass(frozen=True)
class Counts:
    """Operators, launches and Python of the host that a trace counts.

    Args:
        operators: operators with a kernel.
        triton: those of them that Triton launches.
        python: operators that the Python between them is worth.
    """

    operators: float
    triton: float
    python: float


def tiny_qwen3(num_layers: int = NUM_LAYERS) -> Model:
    """Return a Qwen3 of narrow layers, in bfloat16, in training mode."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=WIDTH // 2,
    )
    model: Any = Qwen3ForCausalLM(config)
    return model.to(torch.bfloat16).train()


def run_pass(model: Model) -> None:
    """Run a forward and a backward pass of a small model."""
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device=model.device)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def counts_of_pass(
    model: Model, change: Callable[[Model], object], run: Callable[[Model], None] = run_pass
) -> Counts:
    """Return what a trace counts of a pass with gradients to add to.

    Args:
        model: the model, which is moved to a virtual GPU.
        change: changes the model once it is there.
        run: runs a pass.
    """
    with VirtualGPU("h100-80gb") as gpu:
        change(gpu.place(model))
        run(model)
        begin = len(gpu.recorder.work.entries)
        run(model)
        kernels = [one for one in gpu.recorder.work.entries[begin:] if one.kind == "kernel"]
    return Counts(
        sum(one.times for one in kernels),
        sum(one.times * one.by_triton for one in kernels),
        sum(one.times * one.python_operators for one in kernels),
    )


def fuse(model: Model) -> bool:
    """Let a small model compute with Liger's kernels where its device and this installation can; return whether."""
    return bool(
        enable_fused_operators(model, "auto", device=model.device, compute_dtype=model.dtype).operators
    )


def measure_host(
    device: torch.device,
    *,
    seconds: float = 5.0,
    fuse: Callable[[Model], bool] = fuse,
    on_step: Callable[[float], None] = lambda share: None,
) -> HostCosts:
    """Return the costs of this machine's host with a device, the least of many repetitions each.

    Args:
        device: on a CPU, an operator's time has its computation in it, and no launch.
        seconds: time for the passes of two small models; the rest takes a few more.
        fuse: lets the second one launch by Triton; where it cannot, a launch costs what it does on a usual host.
        on_step: called after each round of passes with the share of the time that has passed.
    """
    plain, fused = (tiny_qwen3().to(device) for _ in range(2))
    models = [plain, fused] if fuse(fused) else [plain]
    least = _least_seconds(models, device, seconds, on_step)
    operator = least[0] / counts_of_pass(tiny_qwen3(), lambda model: None).operators
    triton = reference_host()["triton_launch"]
    if len(models) == 2:
        counts = counts_of_pass(tiny_qwen3(), fuse)
        triton = max(0.0, (least[1] / operator - counts.operators - counts.python) / counts.triton)
    return HostCosts(
        gpu=name_of(device),
        operator_seconds=operator,
        launch_seconds=_launch_seconds(device),
        triton_launch=triton,
        date=str(datetime.date.today()),
    )


def _least_seconds(
    models: list[Model], device: torch.device, seconds: float, on_step: Callable[[float], None]
) -> list[float]:
    """Return the seconds until a pass of each is issued: the least, of passes by turns."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter  # the former tells no other load
    least = [float("inf") for _ in models]
    for model in models:
        run_pass(model)
    begin, rounds = time.perf_counter(), 0
    while rounds < _LEAST_PASSES or time.perf_counter() - begin < seconds:
        for index, model in enumerate(models):
            _wait_for(device)
            start = clock()
            run_pass(model)
            least[index] = min(least[index], clock() - start)
        rounds += 1
        on_step(min(1.0, (time.perf_counter() - begin) / seconds) if seconds else 1.0)
    return least


def _launch_seconds(device: torch.device) -> float:
    """Return the seconds for each further kernel of an operator: joining tensors of many axes copies each."""
    shape = (1,) * 6

    def issued(num_tensors: int) -> float:
        tensors = [torch.zeros(shape, device=device) for _ in range(num_tensors)]
        _wait_for(device)
        return min(timeit.repeat(lambda: torch.cat(tensors), number=20, repeat=20)) / 20

    return max(0.0, issued(_JOINED) - issued(1)) / (_JOINED - 1)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
