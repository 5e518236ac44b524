"""Python between operators counts for the host: passes of autograd functions, hooks, selective checkpoints' modes."""

import functools

import pytest
import torch
from torch.autograd.function import BackwardCFunction, Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lowmem_ft.techniques.checkpointing.recomputed_layer import RecomputedLayer
from lowmem_ft.virtual_gpu import VirtualGPU
from lowmem_ft.virtual_gpu.upstream.host_python import OPERATORS, host_python_counted


class Double(Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, d_result):
        return 2 * d_result


class Quadruple(Function):
    @staticmethod
    def forward(ctx, x):
        return Double.apply(Double.apply(x))

    @staticmethod
    def backward(ctx, d_result):
        return 4 * d_result


MEASURED = {
    "pass": (2.2, 5.6),
    "hook": (1.2, 1.3),
    "short hook": (0.5, 0.9),
    "dispatch": (1.5, 2.0),
    "bitsandbytes": (1.3, 1.4),
}
"""Operators that each was worth, from the least to the most (``scripts/calibrate host``, 2026-11-27 and 30)."""


def test_each_is_worth_what_was_measured():
    assert OPERATORS.keys() == MEASURED.keys()
    for kind, (least, most) in MEASURED.items():
        assert least <= OPERATORS[kind] <= most, kind


def patched():
    modes = _CachingTorchDispatchMode, _CachedTorchDispatchMode
    passes = (
        vars(owner).get(name) for owner in (Function, BackwardCFunction) for name in ("apply", "apply_boxed")
    )
    return [*passes, saved_tensors_hooks.__init__, *(mode.__torch_dispatch__ for mode in modes)]


def python_of_products(entries):
    return [entry.python_operators for entry in entries if entry.kind == "kernel" and entry.name == "mul"]


def test_each_pass_counts_with_the_operator_that_follows():
    before = patched()
    with VirtualGPU("a100-80gb") as gpu:
        x = torch.ones(4, device="cuda", requires_grad=True)
        done = len(gpu.work.entries)
        Double.apply(x * 1).sum().backward()
        assert python_of_products(gpu.work.entries[done:]) == [0, OPERATORS["pass"], OPERATORS["pass"], 0]
        done = len(gpu.work.entries)
        Quadruple.apply(x)
        assert python_of_products(gpu.work.entries[done:]) == [2 * OPERATORS["pass"], OPERATORS["pass"]]
    assert before == patched()


def run_checkpoint(device, **keywords):
    x = torch.ones(4, device=device, requires_grad=True)
    checkpoint(lambda x: x * x, x, use_reentrant=False, **keywords).sum().backward()


def python_of_checkpoint(**keywords):
    """Return what a checkpoint of one product counts on a virtual GPU, and what the same run counts on the CPU."""
    with VirtualGPU("a100-80gb") as gpu:
        done = len(gpu.work.entries)
        run_checkpoint("cuda", **keywords)
        virtual = sum(entry.python_operators for entry in gpu.work.entries[done:])
    real = []
    with host_python_counted(real.append):
        run_checkpoint("cpu", **keywords)
    return virtual, sum(OPERATORS[kind] for kind in real)


def test_a_checkpoints_hooks_count():
    """Both factors are packed in forward, packed again when they are recomputed, and unpacked."""
    assert python_of_checkpoint() == (pytest.approx(6 * OPERATORS["hook"]),) * 2


def test_the_hooks_of_a_recomputed_layer_are_shorter():
    """And one pass of a function, which saves the layer's input."""
    real = []
    with host_python_counted(real.append):
        x = torch.ones(4, requires_grad=True)
        RecomputedLayer(torch.nn.Identity())(lambda x: x * x, x).sum().backward()
    assert sorted(real) == ["pass", *6 * ["short hook"]]


def test_the_modes_of_selective_checkpointing_count_for_each_operator():
    contexts = functools.partial(create_selective_checkpoint_contexts, lambda *args, **kwargs: False)
    virtual, real = python_of_checkpoint(context_fn=contexts)
    assert virtual == pytest.approx(real)
    the_product_twice = 6 * OPERATORS["hook"] + 2 * OPERATORS["dispatch"]
    assert virtual >= the_product_twice  # and by the version of torch what the hooks detach


def test_python_before_a_copy_counts_with_the_next_kernel():
    with VirtualGPU("a100-80gb") as gpu:
        host = torch.ones(4, pin_memory=True)
        x = torch.ones(4, device="cuda")
        done = len(gpu.work.entries)
        gpu.recorder.python_runs("pass")
        x.copy_(host, non_blocking=True)
        _ = x * 2
        copy, product = gpu.work.entries[done:]
    assert (copy.kind, copy.python_operators) == ("copy", 0.0)
    assert product.python_operators == OPERATORS["pass"]


def test_the_python_around_bitsandbytes_kernels_counts():
    functional = pytest.importorskip("bitsandbytes").functional
    with VirtualGPU("a100-80gb") as gpu:
        packed, state = functional.quantize_4bit(torch.ones(64, 64, device="cuda"), quant_type="nf4")
        done = len(gpu.work.entries)
        functional.dequantize_4bit(packed, state)
        counted = {entry.name: entry.python_operators for entry in gpu.work.entries[done:]}
    assert counted["dequantize_4bit"] == OPERATORS["bitsandbytes"]
