"""How many processes there are is known before torch is imported, as accelerate will count them."""

from __future__ import annotations

import pytest

from lowmem_ft.training.distributed_rules import launched_processes


@pytest.mark.parametrize(
    "told,on_gpu,on_cpu",
    [
        ({}, 1, 1),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, 2, 2),
        ({"WORLD_SIZE": "2"}, 1, 2),  # as of a cluster whose jobs have no launcher in them
        ({"WORLD_SIZE": "", "LOCAL_RANK": ""}, 1, 1),
    ],
)
def test_processes_are_counted_as_accelerate_does(told, on_gpu, on_cpu, tiny, monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert launched_processes(tiny("training.use_cpu=false")) == on_gpu
    assert launched_processes(tiny("training.use_cpu=true")) == on_cpu
