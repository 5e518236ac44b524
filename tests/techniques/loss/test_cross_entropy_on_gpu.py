"""The loss's Triton kernel on a CUDA device: its trial passes, and losses and gradients are those without it."""

import itertools

import pytest
import torch
from devices_to_test_on import running_on

from lowmem_ft.techniques.loss.linear_cross_entropy import linear_cross_entropy_sum

pytestmark = pytest.mark.gpu

OPTIONS = ({}, {"logit_softcap": 30.0}, {"logit_scale": 0.25, "label_smoothing": 0.1})


@pytest.mark.parametrize(
    "dtype, options, tiles, vocabulary",
    itertools.product((torch.bfloat16, torch.float16, torch.float32), OPTIONS, (1, 3), (32_000, 50_257)),
)
def test_the_kernel_is_taken_and_agrees(dtype, options, tiles, vocabulary):
    generator = torch.Generator().manual_seed(1)
    with running_on("cuda"):
        hidden, weight = (
            torch.randn(rows, 64, generator=generator).to("cuda", dtype).requires_grad_()
            for rows in (300, vocabulary)
        )
        labels = torch.randint(vocabulary, (300,), generator=generator).cuda()
        factor = torch.full((), 1 / 300, device="cuda")
        answers = []
        for kernel in ("triton", "eager"):  # required: raises if its trial fails
            loss = linear_cross_entropy_sum(
                hidden,
                weight,
                labels,
                chunk_tokens=128,
                vocabulary_tiles=tiles,
                loss_factor=factor,
                kernel=kernel,
                **options,
            )
            answers.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))
    for one, other in zip(*answers, strict=True):
        unit = max(torch.finfo(one.dtype).eps, 2**-16)
        assert (one.double() - other.double()).norm() <= unit * other.double().norm()
