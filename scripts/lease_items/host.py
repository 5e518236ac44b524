"""Seconds of the host for Python around kernels: by them the same GPU is fast in one machine, and slow in another.

Tensors are so small that the GPU waits for the host. ``calibrate host`` tells, on any machine, how many operators each
technique's Python is worth; here are the seconds of one.
"""

from __future__ import annotations

import functools
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lease_items.parts import Numbers, Part, Setting, wait
from torch import Tensor, nn

from lowmem_ft.optimizers import OPTIMIZERS, ChunkedOptimizer

CHAIN = 200
"""Operators, functions or hooks of one measurement: fewer than a GPU's queue holds, which would make the host wait."""


def parts(setting: Setting) -> Iterator[Part]:
    """Yield each kind of Python that a step consists of."""
    repeats = 3 if setting.tiny else 30
    for name, measure in MEASURES.items():
        run = functools.partial(host_seconds, measure, setting.device, repeats)
        yield Part(name=name, run=run, seconds=2)
    needs: dict[str, Any] = {"needs": ("triton",), "needs_cuda": True}
    run = functools.partial(host_seconds, _triton_launches, setting.device, repeats)
    yield Part(name="a launch of a Triton kernel", run=run, seconds=5, **needs)
    run = functools.partial(host_seconds, _updates, setting.device, repeats)
    yield Part(name="our update in Triton, a parameter", run=run, seconds=5, **needs)


def host_seconds(
    measure: Callable[[str], tuple[Callable[[], object], int]], device: str, repeats: int
) -> Numbers:
    """Return the host's seconds for one of the calls that a measure makes: the median, and the least."""
    run, number = measure(device)
    for _ in range(3):
        run()
    seconds = []
    for _ in range(repeats):
        wait(device)
        seconds.append(timeit.timeit(run, number=1) / number)
    wait(device)
    seconds.sort()
    return {"host_seconds": seconds[len(seconds) // 2], "host_seconds_least": seconds[0]}


def operators(device: str) -> tuple[Callable[[], object], int]:
    """Return a chain of operators with autograd, and how many they are."""
    value = torch.zeros(8, device=device, requires_grad=True)

    def run() -> object:
        result = value
        for _ in range(CHAIN):
            result = result + 1
        return result

    return run, CHAIN


class _Twice(torch.autograd.Function):
    """A function in Python that saves a tensor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value * 2

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> Tensor:  # type: ignore[override]
        (_,) = ctx.saved_tensors
        return d_output * 2


def _functions(device: str) -> tuple[Callable[[], object], int]:
    value = torch.zeros(8, device=device, requires_grad=True)

    def run() -> None:
        result: Any = value
        for _ in range(CHAIN):
            result = _Twice.apply(result)
        torch.autograd.grad(result.sum(), value)

    return run, CHAIN


def _hooks(device: str) -> tuple[Callable[[], object], int]:
    """Save a tensor and read it again, under hooks that hand it through."""
    value = torch.zeros(8, device=device, requires_grad=True)

    def run() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            result = value
            for _ in range(CHAIN):
                result = result.sin()  # saves its input
        torch.autograd.grad(result.sum(), value)

    return run, CHAIN


def _sines(device: str) -> tuple[Callable[[], object], int]:
    value = torch.zeros(8, device=device, requires_grad=True)

    def run() -> None:
        result = value
        for _ in range(CHAIN):
            result = result.sin()
        torch.autograd.grad(result.sum(), value)

    return run, CHAIN


class _Child(nn.Module):
    def forward(self, value: Tensor, **kwargs: object) -> Tensor:
        return value


def _modules(device: str) -> tuple[Callable[[], object], int]:
    child, value = _Child(), torch.zeros(8, device=device)

    def run() -> None:
        for _ in range(CHAIN):
            child(value, attention_mask=None, use_cache=False)

    return run, CHAIN


def _plain_python(device: str) -> tuple[Callable[[], object], int]:
    """Calls and dictionaries without torch: the ratio of two machines' Python."""
    table = {str(number): number for number in range(64)}

    def run() -> None:
        for _ in range(CHAIN):
            dict(sorted(table.items(), key=lambda pair: pair[1]))

    return run, CHAIN


MEASURES = {
    "an operator with autograd": operators,
    "a function in Python, both passes": _functions,
    "an operator and its backward under hooks on what it saves": _hooks,
    "the same without hooks": _sines,
    "a call of a module": _modules,
    "plain Python": _plain_python,
}


def _triton_launches(device: str) -> tuple[Callable[[], object], int]:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    @triton.jit
    def add_one(values: Any, SIZE: tl.constexpr) -> None:
        at = values + tl.arange(0, SIZE)
        tl.store(at, tl.load(at) + 1)

    jitted: Any = add_one
    values, kernel = torch.zeros(128, device=device), jitted[(1,)]

    def run() -> None:
        for _ in range(CHAIN):
            kernel(values, SIZE=128)

    return run, CHAIN


def _updates(device: str) -> tuple[Callable[[], object], int]:
    parameters = [nn.Parameter(torch.zeros(256, dtype=torch.bfloat16, device=device)) for _ in range(CHAIN)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    hyperparameters = {"lr": 1e-5, "weight_decay": 0.0, **OPTIMIZERS["adamw"].hyperparameters}
    rule = OPTIMIZERS["adamw"].update_rule()
    optimizer = ChunkedOptimizer(parameters, rule, hyperparameters, state="8bit", master="split16", seed=0)
    optimizer.kernel = "triton"
    return optimizer.step, CHAIN
