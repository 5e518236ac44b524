"""The Triton kernel on a CUDA device, for every rule and format: its trial passes, and weights are those without it."""

import itertools

import pytest
import torch
from devices_to_test_on import running_on
from torch import nn

from lowmem_ft.foundation.tensors.gradient_slice import GradientSlice
from lowmem_ft.optimizers import OPTIMIZERS, ChunkedOptimizer

pytestmark = pytest.mark.gpu

MASTERS = ("weight", "fp32", "split16", "split24", "stochastic_rounding", "none")
STATES = ("fp32", "bf16", "8bit")


def weights_after_steps(name, state, master, kernel):
    generator = torch.Generator().manual_seed(1)
    dtype = torch.float32 if master == "weight" else torch.bfloat16
    parameter = nn.Parameter((torch.randn(70_000, generator=generator) * 0.02).to("cuda", dtype))
    optimizer = ChunkedOptimizer(
        [parameter],
        OPTIMIZERS[name].update_rule(),
        {"lr": 1e-3, "weight_decay": 0.1, **OPTIMIZERS[name].hyperparameters},
        state=state,
        master="fp32" if master == "weight" else master,
        seed=2**40 + 9,
    )
    optimizer.kernel = kernel
    for _ in range(3):
        gradient = torch.randn(70_000, generator=generator).to("cuda", torch.bfloat16)
        optimizer.update([GradientSlice(parameter, gradient)], scale=torch.tensor(0.37, device="cuda"))
    return optimizer.master_of(parameter).read(parameter.detach(), optimizer.state[parameter])


@pytest.mark.parametrize("name,state,master", itertools.product(("adamw", "lion", "sgd"), STATES, MASTERS))
def test_the_kernel_is_taken_and_agrees(name, state, master):
    with running_on("cuda"):
        found = weights_after_steps(name, state, master, "triton")  # required: raises if its trial fails
        expected = weights_after_steps(name, state, master, "eager")
    near = (found - expected).abs() <= expected.abs() * 2**-7 + 2**-16
    assert near.double().mean() >= 0.999
