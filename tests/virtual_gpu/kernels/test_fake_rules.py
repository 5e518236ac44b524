"""Operators whose steps depend on the device being CUDA take CUDA's."""

from __future__ import annotations

import pytest
import torch

from lowmem_ft.virtual_gpu.gpu import VirtualGPU

BATCH, SIDE = 4, 256
FULL_BYTES = BATCH * SIDE * SIDE * 4
HALF_BYTES = FULL_BYTES // 2


def sizes(program) -> list[int]:
    """Of all buffers that a program takes, in bytes, in order."""
    with VirtualGPU("t4") as gpu:
        program(gpu.device)
    return [allocation.size_bytes for allocation in gpu.recorder.timeline.allocations]


@pytest.mark.parametrize("softmax", [torch.softmax, torch.log_softmax])
def test_softmax_of_float16_in_float32_makes_no_copy_first(softmax):
    def program(device):
        softmax(torch.empty(BATCH, SIDE, SIDE, dtype=torch.float16, device=device), -1, dtype=torch.float32)

    assert sizes(program) == [HALF_BYTES, FULL_BYTES]


def test_softmax_of_bfloat16_in_float32_does():
    def program(device):
        torch.softmax(
            torch.empty(BATCH, SIDE, SIDE, dtype=torch.bfloat16, device=device), -1, dtype=torch.float32
        )

    assert sizes(program) == [HALF_BYTES, FULL_BYTES, FULL_BYTES]


def test_its_gradient_is_float16_at_once_and_takes_a_product_beside():
    def program(device):
        scores = torch.empty(BATCH, SIDE, SIDE, dtype=torch.float16, device=device, requires_grad=True)
        weights = torch.softmax(scores, -1, dtype=torch.float32)
        weights.backward(torch.empty_like(weights))

    forward = [HALF_BYTES, FULL_BYTES, FULL_BYTES]
    assert sizes(program) == [
        *forward,
        HALF_BYTES,
        FULL_BYTES,
    ]  # the result comes before the kernel's own buffer
