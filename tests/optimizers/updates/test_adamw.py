"""Our AdamW against torch's, and what each weight format makes of small updates."""

import pytest
import torch
from torch import nn

from lowmem_ft.optimizers.chunked.chunked_optimizer import ChunkedOptimizer
from lowmem_ft.optimizers.updates.adamw import AdamW

HYPERPARAMETERS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(100, 37), (7,), (513,), (), (3, 5, 70)]


def weights(seed=0):
    """Numbers that bfloat16 holds in full, of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(shape, generator=generator)
            * 10 ** torch.randint(-3, 2, shape, generator=generator).float()
        )
        .bfloat16()
        .float()
        for shape in SHAPES
    ]


def ours(dtype, master="fp32", state="fp32", chunk_elements=None, **hyperparameters):
    parameters = [nn.Parameter(weight.to(dtype)) for weight in weights()]
    optimizer = ChunkedOptimizer(
        parameters, AdamW(), {**HYPERPARAMETERS, **hyperparameters}, master=master, state=state
    )
    optimizer.chunk_elements = chunk_elements
    return optimizer


def float32_weights(optimizer):
    return [
        optimizer.master_of(parameter).read(parameter.detach().view(-1), optimizer.state[parameter])
        for parameter in optimizer.param_groups[0]["params"]
    ]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_100_steps_are_torchs_bit_for_bit_in_every_exact_format_and_chunk_size(weight_decay):
    reference = torch.optim.AdamW(
        [nn.Parameter(weight) for weight in weights()],
        **{**HYPERPARAMETERS, "weight_decay": weight_decay},
        foreach=False,
        fused=False,
    )
    kinds = [(torch.float32, "fp32"), (torch.bfloat16, "fp32"), (torch.bfloat16, "split16")]
    optimizers = [
        ours(dtype, master, chunk_elements=chunk_elements, weight_decay=weight_decay)
        for dtype, master in kinds
        for chunk_elements in (256, 1024, None)
    ]
    generator = torch.Generator().manual_seed(1)
    for step in range(100):
        gradients = [torch.randn(shape, generator=generator) * (step % 7) for shape in SHAPES]
        for optimizer in (reference, *optimizers):
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / 120)
            for parameter, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
                parameter.grad_dtype = None
                parameter.grad = gradient.clone()
            optimizer.step()
    for optimizer in optimizers:
        for parameter, twin, weight in zip(
            optimizer.param_groups[0]["params"],
            reference.param_groups[0]["params"],
            float32_weights(optimizer),
            strict=True,
        ):
            assert torch.equal(weight, twin.detach().view(-1))
            state, twin_state = optimizer.state[parameter], reference.state[twin]
            assert state["step"] == twin_state["step"] == 100
            assert torch.equal(state["exp_avg"], twin_state["exp_avg"].view(-1))
            assert torch.equal(state["exp_avg_sq"], twin_state["exp_avg_sq"].view(-1))


def test_bfloat16_gradients_are_widened_before_anything_else():
    first, second = ours(torch.bfloat16, "split16"), ours(torch.float32)
    for parameter, twin in zip(
        first.param_groups[0]["params"], second.param_groups[0]["params"], strict=True
    ):
        parameter.grad = torch.randn(parameter.shape).bfloat16()
        twin.grad = parameter.grad.float()
    first.step()
    second.step()
    for one, other in zip(float32_weights(first), float32_weights(second), strict=True):
        assert torch.equal(one, other)


class NoisyQuadratic:
    """Weights about 0.02 and an optimum 0.01 away, seen through gradients with noise; 300 steps of AdamW."""

    def __init__(self, num_elements=20_000):
        generator = torch.Generator().manual_seed(0)
        self.start = (torch.randn(num_elements, generator=generator) * 0.02).bfloat16()
        self.optimum = self.start.float() + torch.randn(num_elements, generator=generator) * 0.01

    def loss_drop(self, dtype, master, lr, state="fp32", seed=0, num_steps=300):
        parameter = nn.Parameter(self.start.to(dtype, copy=True))
        optimizer = ChunkedOptimizer(
            [parameter],
            AdamW(),
            {**HYPERPARAMETERS, "lr": lr, "weight_decay": 0.0},
            master=master,
            state=state,
            seed=seed,
        )
        optimizer.allocate_state()
        parameter.grad_dtype = None
        generator = torch.Generator().manual_seed(1)
        for _ in range(num_steps):
            noise = torch.randn(self.start.shape, generator=generator) * 0.02
            parameter.grad = _value(optimizer, parameter) - self.optimum + noise
            optimizer.step()
        return self._loss(self.start) - self._loss(_value(optimizer, parameter))

    def _loss(self, weight):
        return (weight.double() - self.optimum.double()).square().mean().item()


def _value(optimizer, parameter):
    """The weight in float32, with what is kept beside it."""
    return optimizer.master_of(parameter).read(parameter.detach(), optimizer.state[parameter])


@pytest.mark.parametrize("lr", [1e-6, 1e-7])
def test_at_small_rates_24_bits_keep_the_progress_that_plain_bfloat16_loses(lr):
    problem = NoisyQuadratic()
    full = problem.loss_drop(torch.float32, "fp32", lr)
    assert full > 0
    share = {
        master: problem.loss_drop(torch.bfloat16, master, lr) / full
        for master in ("split16", "split24", "none")
    }
    assert share["split16"] == 1
    assert 0.99 < share["split24"] < 1.01
    assert share["none"] < 0.01


@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_compact_state_keeps_the_progress_too(state):
    problem = NoisyQuadratic()
    full = problem.loss_drop(torch.float32, "fp32", 1e-5)
    assert problem.loss_drop(torch.bfloat16, "split24", 1e-5, state) / full == pytest.approx(1, abs=0.05)
