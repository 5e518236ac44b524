"""Gradients of bfloat16 weights are summed in float32, in either order, for whichever optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lowmem_ft.techniques.accumulation.float32_accumulation import enable_float32_accumulation

MICRO_BATCHES = 64


def layer():
    torch.manual_seed(0)
    return nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)


def accumulate(model):
    """Sixty-four equal gradients: in bfloat16 a sum stops growing where one of them is below its rounding."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    for _ in range(MICRO_BATCHES):
        model(x).sum().backward()


def one_gradient():
    model = layer()
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    model(x).sum().backward()
    return model.weight.grad.float()


def test_a_sum_is_exact():
    model = layer()
    enable_float32_accumulation(torch.optim.SGD(model.parameters()), takes_float32=True)
    accumulate(model)
    assert model.weight.grad.dtype == torch.float32
    assert torch.equal(model.weight.grad, MICRO_BATCHES * one_gradient())


def test_a_sum_in_bfloat16_is_not():
    """The test above could not fail without this."""
    model = layer()
    accumulate(model)
    error = (model.weight.grad.float() / (MICRO_BATCHES * one_gradient()) - 1).abs().max()
    assert error > 0.01


def test_several_uses_in_one_backward_are_summed_in_float32_too():
    """As in vertical order."""
    model = layer()
    enable_float32_accumulation(torch.optim.SGD(model.parameters()), takes_float32=True)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    sum(model(x).sum() for _ in range(MICRO_BATCHES)).backward()
    assert torch.equal(model.weight.grad, MICRO_BATCHES * one_gradient())


class OwnTypeOnly(torch.optim.SGD):
    """Like bitsandbytes': it reads weight and gradient as one type."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.grad.dtype == parameter.dtype
                self.seen = parameter.grad.clone()


def test_an_optimizer_that_wants_the_weights_type_gets_the_sum_rounded_once():
    model = layer()
    optimizer = OwnTypeOnly(model.parameters())
    enable_float32_accumulation(optimizer, takes_float32=False)
    for _ in range(2):
        accumulate(model)
        assert model.weight.grad.dtype == torch.float32
        optimizer.step()
        assert model.weight.grad is None
        assert torch.equal(optimizer.seen, (MICRO_BATCHES * one_gradient()).bfloat16())


@pytest.mark.parametrize("takes_float32", [False, True])
def test_remove_gives_gradients_the_weights_type_again(takes_float32):
    model = layer()
    stock = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = enable_float32_accumulation(optimizer, takes_float32=takes_float32)
    accumulate(model)
    handle.remove()
    assert model.weight.grad.dtype == torch.bfloat16
    optimizer.zero_grad()
    accumulate(model)
    accumulate(stock)
    assert torch.equal(model.weight.grad, stock.weight.grad)
    optimizer.step()
    assert model.weight.grad is not None


def test_float32_weights_are_left_alone(caplog):
    caplog.set_level("INFO")
    model = nn.Linear(4, 4)
    enable_float32_accumulation(torch.optim.SGD(model.parameters()), takes_float32=True).remove()
    assert caplog.text == ""
