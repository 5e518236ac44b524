"""A trace that has missed an optimizer's state says so, and gives no numbers that are too low."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from lowmem_ft import VirtualGPU
from lowmem_ft.foundation.errors import LostMemoryError
from lowmem_ft.foundation.units import MIB


class MakesStateUnseen(torch.optim.Optimizer):
    """As an operator does that runs where no dispatch mode sees it."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            mode = parameter.fake_mode
            with _disable_current_modes(), mode:
                self.state[parameter]["momentum"] = [torch.zeros(*parameter.shape, device=parameter.device)]


def a_step(make_optimizer):
    layer = nn.Linear(512, 512, bias=False, device="cuda")
    optimizer = make_optimizer(layer.parameters())
    layer(torch.randn(2, 512, device="cuda")).sum().backward()
    optimizer.step()
    return optimizer


def test_state_that_no_operator_was_seen_to_make_is_an_error():
    with VirtualGPU("rtx-4090"), pytest.raises(LostMemoryError, match=rf"{MIB:,} bytes.*error of lowmem_ft"):
        a_step(lambda weights: MakesStateUnseen(weights, {}))


def test_an_optimizer_of_torch_without_its_state_is_an_error():
    def forgetful(weights):
        optimizer = torch.optim.AdamW(weights)
        optimizer.register_step_post_hook(lambda *args: optimizer.state.clear())
        return optimizer

    with VirtualGPU("rtx-4090"), pytest.raises(LostMemoryError, match="AdamW has stepped and keeps no state"):
        a_step(forgetful)


@pytest.mark.parametrize("settings", [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}])
def test_an_optimizer_that_needs_no_state_may_have_none(settings):
    with VirtualGPU("rtx-4090") as gpu:
        optimizer = a_step(lambda weights: torch.optim.SGD(weights, **settings))
        kept = [one for one in gpu.trace().timeline.allocations if one.category == "optimizer_state"]
    assert sum(one.size_bytes for one in kept) == (MIB if "momentum" in settings else 0)
    del optimizer


def test_state_within_lists_and_wrappers_is_optimizer_state():
    class InLists(torch.optim.Optimizer):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["factors"] = {"both": [torch.zeros_like(parameter) for _ in range(2)]}

    with VirtualGPU("rtx-4090") as gpu:
        optimizer = a_step(lambda weights: InLists(weights, {}))
        kept = [one for one in gpu.trace().timeline.allocations if one.category == "optimizer_state"]
    assert sum(one.size_bytes for one in kept) == 2 * MIB
    del optimizer
