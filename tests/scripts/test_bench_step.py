"""Both trainers' steps are timed from when the device is done to when it is done again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from bench.step import _Alternate

from lowmem_ft.virtual_gpu import VirtualGPU


def test_the_clock_is_read_once_the_device_is_done():
    weight: list[Any] = []

    def step():
        weight.append(torch.ones(8, device="cuda") * 2)
        return {"loss": 1.0}

    with VirtualGPU("l4") as gpu:
        machine = SimpleNamespace(device=torch.device("cuda"))
        ours: Any = SimpleNamespace(runtime=SimpleNamespace(machine=machine), step=step)
        _Alternate(ours).on_step_end()
        order = [work.kind for work in gpu.work.entries]
    assert order[0] == order[-1] == "synchronize"
    assert "kernel" in order[1:-1]
    assert order.count("synchronize") == 2
