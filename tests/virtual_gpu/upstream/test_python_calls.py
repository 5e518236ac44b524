"""Passes of autograd functions written in Python are counted for the host: forward and backward, nested ones too."""

import torch
from torch.autograd.function import BackwardCFunction, Function

from lowmem_ft.virtual_gpu import VirtualGPU


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


def calls_of(entries):
    return [entry.python_calls for entry in entries if entry.kind == "kernel" and entry.name == "mul"]


def test_each_pass_counts_with_the_operator_that_follows():
    before = Function.__dict__["apply"], BackwardCFunction.__dict__["apply"]
    with VirtualGPU("a100-80gb") as gpu:
        x = torch.ones(4, device="cuda", requires_grad=True)
        done = len(gpu.work.entries)
        Double.apply(x * 1).sum().backward()
        assert calls_of(gpu.work.entries[done:]) == [0, 1, 1, 0]
        done = len(gpu.work.entries)
        Quadruple.apply(x)
        assert calls_of(gpu.work.entries[done:]) == [2, 1]
    assert before == (Function.__dict__["apply"], BackwardCFunction.__dict__["apply"])
