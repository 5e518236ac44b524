"""Exceptions of hooks in a backward pass on a virtual GPU: the program gets them, as on a GPU."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowmem_ft.virtual_gpu.device import guard
from lowmem_ft.virtual_gpu.device.guard import VirtualDeviceGuard
from lowmem_ft.virtual_gpu.gpu import VirtualGPU


def raises(error):
    def hook(*_):
        raise error

    return hook


def after_accumulation(linear, input, error):
    linear.weight.register_post_accumulate_grad_hook(raises(error))
    return linear(input)


def on_gradient(linear, input, error):
    linear.weight.register_hook(raises(error))
    return linear(input)


def on_gradient_in_nested_backward(linear, input, error):
    return checkpoint(lambda input: on_gradient(linear, input, error), input, use_reentrant=True)


def on_saved_tensor(linear, input, error):
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, raises(error)):
        return linear(input)


@pytest.mark.parametrize("error", [ValueError("mine"), StopIteration(), SystemError("mine")], ids=repr)
@pytest.mark.parametrize(
    "forward", [after_accumulation, on_gradient, on_gradient_in_nested_backward, on_saved_tensor]
)
def test_a_program_gets_the_exception_of_its_hook(forward, error):
    with VirtualGPU("t4"):
        linear, head = nn.Linear(8, 8).cuda(), nn.Linear(8, 8).cuda()
        output = head(forward(linear, torch.ones(2, 8, device="cuda", requires_grad=True), error))
        with pytest.raises(type(error)) as caught:
            output.sum().backward()
        assert caught.value is error
        assert traceback.extract_tb(error.__traceback__)[-1].name == "hook"
        assert error.__cause__ is None
        assert error.__context__ is None

        head(torch.ones(2, 8, device="cuda")).sum().backward()  # the next pass knows nothing of it
        assert head.weight.grad is not None


def test_the_guard_keeps_nothing_that_is_raised_elsewhere(monkeypatch):
    """Such as by a handler of Ctrl-C."""
    monkeypatch.setattr(
        "lowmem_ft.virtual_gpu.device.guard._raise_current_error", raises(KeyboardInterrupt())
    )
    with pytest.raises(KeyboardInterrupt):
        VirtualDeviceGuard().type_()


@pytest.mark.parametrize("ends_with", [None, RuntimeError("the engine's own")])
def test_nothing_that_was_taken_is_left_for_a_later_pass(monkeypatch, ends_with):
    """Such as a timeout's exception, raised while the guard was asked."""
    monkeypatch.setattr(guard, "is_in_backward", lambda: True)
    monkeypatch.setattr(guard, "_raise_current_error", raises(TimeoutError()))

    def run():
        VirtualDeviceGuard().type_()
        if ends_with is not None:
            raise ends_with

    with pytest.raises(TimeoutError if ends_with is None else RuntimeError):
        guard._run_backward(run)
    assert guard._taken == []


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, *gradients):
        raise ValueError("no")


def _fail_in_a_branch():
    tensor = torch.randn(1000, device="cuda", requires_grad=True)
    (tensor.tanh().sin() * 2 + _Fails.apply(tensor.sigmoid().cos())).sum().backward()


def _fail_in_a_hook():
    tensor = torch.randn(1000, device="cuda", requires_grad=True)
    product = tensor.tanh()
    product.register_hook(lambda gradient: 1 / 0)
    product.sum().backward()


@pytest.mark.parametrize("fail", [_fail_in_a_branch, _fail_in_a_hook])
def test_nothing_is_held_of_a_backward_pass_that_failed(fail):
    with VirtualGPU("t4") as gpu:
        with pytest.raises((ValueError, ZeroDivisionError)):
            fail()
        assert gpu.recorder.live_bytes == 0
