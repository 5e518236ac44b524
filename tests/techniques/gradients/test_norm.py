"""The norm of 16-bit gradients in float32, in bounded memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.techniques.gradients import norm as module
from lowmem_ft.techniques.gradients.norm import clip_grad_norm, norm_in_float32
from lowmem_ft.virtual_gpu.gpu import VirtualGPU


def parameters(dtype, *shapes):
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return made


def exact_norm(made):
    return math.sqrt(sum(float(parameter.grad.double().square().sum()) for parameter in made))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_has_the_digits_of_float32(dtype):
    made = parameters(dtype, (64, 33), (7,), ())
    assert float(clip_grad_norm(made, math.inf)) == pytest.approx(exact_norm(made), rel=1e-6)


def test_that_of_torch_has_three():
    """Why this file is there."""
    made = parameters(torch.bfloat16, (64, 33), (7,), ())
    norm = float(torch.nn.utils.clip_grad_norm_(made, math.inf))
    assert abs(norm / exact_norm(made) - 1) > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_scaled_to_the_limit_and_left_alone_below_it(dtype):
    made = parameters(dtype, (64, 33), (7,))
    before = [parameter.grad.clone() for parameter in made]
    norm = clip_grad_norm(made, 1e6)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(made, before, strict=True))
    clip_grad_norm(made, 1.0)
    for parameter, grad in zip(made, before, strict=True):
        expected = (grad.float() * (1 / (norm + 1e-6))).to(dtype)
        torch.testing.assert_close(
            parameter.grad, expected, rtol=1e-6 if dtype == torch.float32 else 0, atol=0
        )


def test_32_bit_gradients_are_clipped_by_torch_bit_for_bit():
    ours, stock = parameters(torch.float32, (64, 33), (7,)), parameters(torch.float32, (64, 33), (7,))
    assert torch.equal(clip_grad_norm(ours, 1.0), torch.nn.utils.clip_grad_norm_(stock, 1.0))
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(ours, stock, strict=True))


def test_no_gradient_is_converted_as_a_whole(monkeypatch):
    monkeypatch.setattr(module, "_ELEMENTS_AT_ONCE", 1024)
    made = parameters(torch.bfloat16, (256, 256))
    with StorageTracker() as tracker:
        clip_grad_norm(made, 1.0)
    assert tracker.peak_bytes < 4 * 3 * 1024


def test_a_gradient_in_another_order_of_axes_counts_too():
    gradient = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).t()
    torch.testing.assert_close(norm_in_float32(gradient), gradient.norm())


@pytest.mark.parametrize("dtypes", [[torch.bfloat16], [torch.float32], [torch.bfloat16, torch.float16]])
def test_with_the_launches_of_a_gpu_the_norm_is_the_same(dtypes, monkeypatch):
    plain, together = ([p for dtype in dtypes for p in parameters(dtype, (64, 33), (7,))] for _ in range(2))
    expected = clip_grad_norm(plain, 1.0)
    monkeypatch.setattr(module, "kernels_of", lambda device: "cuda")
    torch.testing.assert_close(clip_grad_norm(together, 1.0), expected, rtol=1e-6, atol=0)
    for one, other in zip(together, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("dtype,most", [(torch.bfloat16, 20 + 30), (torch.float32, 20)])
def test_a_gpu_takes_a_few_launches_for_all_norms_and_at_most_one_to_scale_a_gradient(dtype, most):
    with VirtualGPU("h100-80gb") as gpu:
        made = [nn.Parameter(torch.zeros(2**23, dtype=dtype, device=gpu.device)) for _ in range(30)]
        for parameter in made:
            parameter.grad = torch.zeros_like(parameter)
        first = len(gpu.recorder.work.entries)
        clip_grad_norm(made, 1.0)
        launches = sum(
            entry.times * entry.num_launches
            for entry in gpu.recorder.work.entries[first:]
            if entry.kind == "kernel"
        )
    assert launches <= most


def test_parameters_without_gradients_are_passed_over():
    made = [*parameters(torch.bfloat16, (8,)), nn.Parameter(torch.zeros(3))]
    assert float(clip_grad_norm(made, 1.0)) > 1
    assert made[1].grad is None
