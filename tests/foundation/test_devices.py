from __future__ import annotations

import pytest
import torch

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.training.step.machine import Machine


@pytest.mark.parametrize("device, seen", [("mps", r"Apple's GPU \(mps\)"), ("xpu", r"an Intel GPU \(xpu\)")])
def test_no_step_starts_on_another_makers_gpu(device, seen):
    with pytest.raises(
        UserError, match=f"NVIDIA's GPUs and on processors, got {seen}.*training.use_cpu=true"
    ):
        Machine(torch.device(device))


def test_a_torch_for_rocm_is_seen_although_it_calls_its_gpus_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(UserError, match="got an AMD GPU"):
        Machine(torch.device("cuda"))
    Machine(torch.device("cpu"))
