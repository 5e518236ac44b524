from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from lowmem_ft.foundation.system.device_memory import ProcessBytes

DEVICE = torch.device("cuda", 0)


def test_without_nvml_the_whole_device_counts(cuda_driver, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    cuda_driver(total_memory=1000).hold(20, 80)
    assert ProcessBytes(DEVICE).read() == (130, "cudaMemGetInfo, the whole device")


def test_without_nvml_others_are_taken_off(cuda_driver, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    driver = cuda_driver(total_memory=1000)
    driver.bytes["others"] = 300
    assert ProcessBytes(DEVICE, 300).read() == (50, "cudaMemGetInfo, less what others held at the beginning")


class NVMLError(Exception):
    pass


def handle_of(uuid):
    if uuid != "GPU-abc":
        raise NVMLError
    return uuid


@pytest.mark.parametrize("uuid,knows_us", [("abc", True), ("abc", False), ("of a part by MIG", True)])
def test_nvml_counts_this_process_if_it_knows_it(cuda_driver, monkeypatch, uuid, knows_us):
    cuda_driver(total_memory=1000, uuid=uuid)
    monkeypatch.setattr(os, "getpid", lambda: 7)
    processes = [
        SimpleNamespace(pid=6, usedGpuMemory=1),
        SimpleNamespace(pid=7 if knows_us else 8, usedGpuMemory=2),
    ]
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        NVMLError=NVMLError,
        nvmlDeviceGetHandleByUUID=handle_of,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: processes,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert ProcessBytes(DEVICE).read()[0] == (2 if (uuid, knows_us) == ("abc", True) else 50)
