"""Exceptions of hooks in a backward pass on a virtual GPU: the program gets them, as on a GPU."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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
