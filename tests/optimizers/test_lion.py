"""Our Lion against bitsandbytes' and against the paper's formula."""

import pytest
import torch
from bitsandbytes.optim import Lion as BitsandbytesLion
from torch import nn

from lowmem_ft.optimizers import lion
from lowmem_ft.optimizers.lion import Lion, lion_update

HYPERPARAMETERS = {"lr": 3e-3, "betas": (0.9, 0.98), "weight_decay": 0.1}


def gradients(shape, steps, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(steps)]


def run(optimizer_class, weight, grads, **hyperparameters):
    parameter = nn.Parameter(weight.clone())
    optimizer = optimizer_class([parameter], **hyperparameters)
    for gradient in grads:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


def test_the_update_is_the_papers():
    weight, gradient, momentum = (
        torch.tensor([1.0, -2.0]),
        torch.tensor([0.5, 0.5]),
        torch.tensor([-0.1, 0.3]),
    )
    new_weight, new_momentum = lion_update(
        weight, gradient, momentum, lr=0.1, betas=(0.9, 0.99), weight_decay=0.5
    )
    # direction: sign(0.9 * -0.1 + 0.1 * 0.5) = -1, sign(0.9 * 0.3 + 0.1 * 0.5) = 1
    torch.testing.assert_close(new_weight, torch.tensor([1.0 * 0.95 + 0.1, -2.0 * 0.95 - 0.1]))
    torch.testing.assert_close(new_momentum, torch.tensor([0.99 * -0.1 + 0.005, 0.99 * 0.3 + 0.005]))
    assert torch.equal(weight, torch.tensor([1.0, -2.0]))


@pytest.mark.parametrize("shape", [(), (7,), (33, 5)])
def test_it_agrees_with_bitsandbytes_over_20_steps(shape):
    weight, grads = torch.randn(shape, generator=torch.Generator().manual_seed(1)), gradients(shape, 20)
    ours, _ = run(Lion, weight, grads, **HYPERPARAMETERS)
    theirs, _ = run(BitsandbytesLion, weight, grads, **HYPERPARAMETERS)
    torch.testing.assert_close(ours, theirs)


def test_chunks_change_nothing(monkeypatch):
    weight, grads = torch.randn(50, 9), gradients((50, 9), 5)
    whole, _ = run(Lion, weight, grads, **HYPERPARAMETERS)
    monkeypatch.setattr(lion, "CHUNK_ELEMENTS", 20)  # two rows at a time
    chunked, state = run(Lion, weight, grads, **HYPERPARAMETERS)
    assert torch.equal(whole, chunked)
    assert state["momentum"].count_nonzero() == state["momentum"].numel()


def test_a_transposed_weight_is_updated_in_place():
    weight, grads = torch.randn(9, 5), gradients((5, 9), 3)
    expected, _ = run(Lion, weight.t().contiguous(), grads, **HYPERPARAMETERS)
    transposed = nn.Parameter(weight.t())
    optimizer = Lion([transposed], **HYPERPARAMETERS)
    for gradient in grads:
        transposed.grad = gradient
        optimizer.step()
    assert not transposed.is_contiguous()
    assert torch.equal(transposed.detach(), expected)


def test_bfloat16_weights_are_rounded_once_a_step():
    """Decay and step together move the weight by one bfloat16 unit where each of them alone rounds away."""
    weight = torch.full((4,), 1.0, dtype=torch.bfloat16)
    unit = 2.0**-8  # spacing of bfloat16 just below 1
    moved, _ = run(Lion, weight, [torch.ones_like(weight)], lr=0.4 * unit, weight_decay=0.0)
    assert torch.equal(moved, weight)
    moved, _ = run(Lion, weight, [torch.ones_like(weight)], lr=0.4 * unit, weight_decay=1.0)
    assert torch.equal(moved, weight - unit)
