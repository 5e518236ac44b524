"""Our Lion against bitsandbytes' and against the paper's formula."""

import pytest
import torch
from bitsandbytes.optim import Lion as BitsandbytesLion
from torch import nn

from lowmem_ft.optimizers.chunked.chunked_optimizer import ChunkedOptimizer
from lowmem_ft.optimizers.updates.lion import Lion
from lowmem_ft.optimizers.updates.update_rule import Chunk

HYPERPARAMETERS = {"lr": 3e-3, "betas": (0.9, 0.98), "weight_decay": 0.1}


def test_the_update_is_the_papers():
    weight, gradient = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.5])
    momentum = torch.tensor([-0.1, 0.3])
    update = Lion().step(1, {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.5})
    update(weight, Chunk(gradient, {"momentum": momentum}, start=0))
    # direction: sign(0.9 * -0.1 + 0.1 * 0.5) = -1, sign(0.9 * 0.3 + 0.1 * 0.5) = 1
    torch.testing.assert_close(weight, torch.tensor([1.0 * 0.95 + 0.1, -2.0 * 0.95 - 0.1]))
    torch.testing.assert_close(momentum, torch.tensor([0.99 * -0.1 + 0.005, 0.99 * 0.3 + 0.005]))
    assert torch.equal(gradient, torch.tensor([0.5, 0.5]))


@pytest.mark.parametrize("shape", [(), (7,), (33, 5)])
def test_it_agrees_with_bitsandbytes_over_20_steps(shape):
    start = torch.randn(shape)
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = ChunkedOptimizer([mine], Lion(), HYPERPARAMETERS)
    reference = BitsandbytesLion([theirs], **HYPERPARAMETERS)
    for _ in range(20):
        mine.grad = torch.randn(shape)
        theirs.grad = mine.grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(mine, theirs)


def test_bfloat16_weights_without_a_master_are_rounded_once_a_step():
    """Decay and step together move the weight by one bfloat16 unit where each of them alone rounds away."""
    unit = 2.0**-8  # spacing of bfloat16 just below 1
    for weight_decay, moved in ((0.0, 0.0), (1.0, unit)):
        parameter = nn.Parameter(torch.full((4,), 1.0, dtype=torch.bfloat16))
        hyperparameters = {"lr": 0.4 * unit, "betas": (0.9, 0.99), "weight_decay": weight_decay}
        optimizer = ChunkedOptimizer([parameter], Lion(), hyperparameters, master="none")
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert (parameter == 1 - moved).all()
