"""``ctc_loss`` by the kernel that torch takes on CUDA: cuDNN's for some types and lengths, else its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lowmem_ft.virtual_gpu.gpu import VirtualGPU

STEPS, ROWS, CLASSES = 50, 4, 20
INT = torch.int32


def loss(targets, input_lengths, target_lengths, *, dtype=torch.float32, **settings):
    scores = torch.randn(STEPS, ROWS, CLASSES, device="cuda", dtype=dtype, requires_grad=True)
    F.ctc_loss(scores.log_softmax(2), targets, input_lengths, target_lengths, **settings).backward()
    assert scores.grad is not None


def host(*numbers, dtype=torch.int64):
    return torch.tensor(numbers, dtype=dtype)


def in_a_row(dtype=INT, device="cpu"):
    return torch.ones(30, dtype=dtype, device=device)


FULL, WANTED = host(*[STEPS] * ROWS), host(10, 8, 7, 5)
BY_CUDNN = {
    "all in 32 bits": lambda: loss(in_a_row(), FULL.int(), WANTED.int()),
    "targets on the device": lambda: loss(in_a_row(device="cuda"), FULL.int(), WANTED.int()),
    "lengths as numbers": lambda: loss(in_a_row(), FULL.tolist(), WANTED.tolist()),
}
BY_TORCH = {
    "targets in 64 bits": lambda: loss(in_a_row(torch.int64), FULL, WANTED),
    "targets row by row": lambda: loss(torch.ones(ROWS, 10, dtype=INT), FULL.int(), WANTED.int()),
    "lengths in 64 bits": lambda: loss(in_a_row(), FULL, WANTED),
    "shorter inputs as numbers": lambda: loss(in_a_row(), [STEPS, 40, 30, 20], WANTED.tolist()),
    "targets longer than inputs": lambda: loss(in_a_row(), host(8, 8, 8, 8, dtype=INT), WANTED.int()),
    "another blank": lambda: loss(in_a_row(), FULL.int(), WANTED.int(), blank=3),
    "float64": lambda: loss(in_a_row(), FULL.int(), WANTED.int(), dtype=torch.float64),
}


@pytest.mark.parametrize(
    "call, kernel",
    [
        *((call, "_cudnn_ctc_loss") for call in BY_CUDNN.values()),
        *((call, "_ctc_loss") for call in BY_TORCH.values()),
    ],
    ids=[*BY_CUDNN, *BY_TORCH],
)
def test_the_kernel_is_the_one_that_torch_takes(call, kernel):
    with VirtualGPU("a100-80gb") as gpu:
        call()
    assert [entry.name for entry in gpu.work.entries if entry.name.endswith("ctc_loss")] == [kernel]


def test_cudnn_may_be_switched_off():
    with VirtualGPU("a100-80gb") as gpu, torch.backends.cudnn.flags(enabled=False):
        BY_CUDNN["all in 32 bits"]()
    assert "_ctc_loss" in {entry.name for entry in gpu.work.entries}
