"""Host memory is as large as asked for, pinned where it can be, and refused before it is too much."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch

from lowmem_ft.foundation import wsl
from lowmem_ft.foundation.errors import DoesNotFitError
from lowmem_ft.foundation.host import pinned_memory
from lowmem_ft.foundation.host.copy_engine import STAGING_BYTES
from lowmem_ft.foundation.host.mapped_files import MappedFiles, is_in_file
from lowmem_ft.foundation.host.pinned_memory import IN_FILES, PAGE_BYTES, HostMemory
from lowmem_ft.foundation.system.host_limits import HostLimit
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

CPU = torch.device("cpu")


class Driver:
    """What ``torch.cuda`` has of a driver that pins ``capacity`` bytes."""

    def __init__(self, capacity):
        self.left = capacity
        self.pinned = {}
        self.synchronized = 0
        self.cleared = []

    def cudart(self):
        return self

    def cudaHostRegister(self, pointer, num_bytes, flags):
        assert [type(argument) for argument in (pointer, num_bytes, flags)] == [int, int, int]
        assert pointer % PAGE_BYTES == 0
        assert num_bytes % PAGE_BYTES == 0
        if num_bytes > self.left:
            return 2
        self.left -= num_bytes
        self.pinned[pointer] = num_bytes
        return 0

    def cudaHostUnregister(self, pointer):
        assert self.synchronized > 0
        self.left += self.pinned.pop(pointer)
        return 0

    def cudaGetErrorString(self, error):
        return "out of memory"

    def synchronize(self, device):
        assert torch.cuda._utils._get_device_index(device, optional=True) == 0
        self.synchronized += 1


@pytest.fixture
def driver(monkeypatch):
    """A CUDA device whose driver pins 10 pages."""
    driver = Driver(10 * PAGE_BYTES)
    monkeypatch.setattr(
        torch, "get_device_module", lambda device: {"cuda": driver}[torch.device(device).type]
    )
    monkeypatch.setattr(pinned_memory, "_clear_last_error", driver.cleared.append)
    return driver


def test_on_a_cpu_a_tensor_takes_its_own_bytes():
    memory = HostMemory(CPU)
    with StorageTracker() as tracker:
        tensor = memory.allocate((3, 5), torch.bfloat16, "gradient")
        assert tracker.live_bytes == 30
    assert not memory.is_pinned
    assert tensor.shape == (3, 5)
    assert tensor.dtype == torch.bfloat16
    assert not tensor.any()
    assert memory.bytes_by_category == {"gradient": 30}


def test_memory_is_counted_until_its_last_view_goes():
    memory = HostMemory(CPU)
    kept = memory.allocate(100, torch.int8, "optimizer_state")[10:20]
    memory.allocate(7, torch.float32, "optimizer_state")
    assert memory.bytes_by_category == {"optimizer_state": 100}
    del kept
    assert memory.bytes_by_category == {"optimizer_state": 0}


def test_memory_goes_with_those_who_keep_a_record_of_its_tensors():
    recorded = []
    memory = HostMemory(CPU, on_allocation=lambda *allocation, recorded=recorded: recorded.append(allocation))
    tensor = memory.allocate(10, torch.float32)
    watched = [weakref.ref(memory), weakref.ref(tensor.untyped_storage())]
    del memory, tensor, recorded
    gc.collect()
    assert [watch() for watch in watched] == [None] * 2


def test_cuda_pins_whole_pages_and_no_power_of_two(driver):
    memory = HostMemory(torch.device("cuda", 0))
    tensor = memory.allocate(5 * PAGE_BYTES // 4 - 1, torch.float32, "parameter")
    assert list(driver.pinned.values()) == [5 * PAGE_BYTES]
    assert memory.bytes_by_category == {"parameter": 5 * PAGE_BYTES}
    tensor += 1
    assert tensor.sum() == tensor.numel()


def test_pages_are_given_back_with_the_last_view(driver):
    memory = HostMemory(torch.device("cuda", 0))
    view = memory.allocate((2, 8), torch.float32)[1]
    assert driver.pinned
    del view
    gc.collect()
    assert not driver.pinned
    assert memory.is_pinned


def test_where_the_driver_refuses_memory_is_pageable_and_said_to_be(driver, caplog):
    memory = HostMemory(torch.device("cuda", 0))
    first = memory.allocate(8 * PAGE_BYTES, torch.uint8)
    with caplog.at_level(logging.WARNING):
        more = [memory.allocate(3 * PAGE_BYTES + index, torch.uint8) for index in range(3)]
    assert not memory.is_pinned
    assert len(driver.pinned) == len(driver.cleared) == 1
    assert [tensor.nbytes for tensor in (first, *more)] == [32768, 12288, 12289, 12290]
    assert len(caplog.messages) == 1
    assert "the driver refused to pin 12.0 KiB: out of memory" in caplog.text


@pytest.mark.parametrize("release", ["6.1.0-28-amd64", "5.15.167.4-microsoft-standard-WSL2"])
def test_under_wsl_staging_buffers_are_pinned_before_all_else(driver, monkeypatch, release):
    """Its driver pins little: once that is used up, copies would have no buffer to go through."""
    monkeypatch.setattr(wsl.platform, "release", lambda: release)
    empty, reserved = torch.empty, []

    def pinning(*shape, pin_memory=False, **options):
        if pin_memory:
            reserved.append((*shape, len(driver.pinned)))
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", pinning)
    memory = HostMemory(torch.device("cuda", 0))
    kept = [memory.allocate(PAGE_BYTES, torch.uint8) for _ in range(2)]
    assert len(driver.pinned) == len(kept)
    assert reserved == ([(STAGING_BYTES, 0)] * 8 if "WSL" in release else [])


def test_a_virtual_gpu_sees_pinned_pages():
    with VirtualGPU("a10g") as gpu:
        memory = HostMemory(gpu.device, is_limited=False)
        tensor = memory.allocate((1000, 3), torch.bfloat16, "optimizer_state")
        assert tensor.is_pinned()
        assert tensor.shape == (1000, 3)
        assert gpu.recorder.live_bytes == 0
    assert gpu.report().host_pinned_bytes == 2 * PAGE_BYTES


def test_what_waits_for_a_visit_lies_in_files_and_the_rest_is_pinned(driver, disk_folder):
    memory = HostMemory(torch.device("cuda", 0), files=MappedFiles(disk_folder))
    in_files = {kind: memory.allocate((2, 5), torch.float32, kind) for kind in IN_FILES}
    pinned = memory.allocate(10, torch.float32, "activation")
    assert set(in_files) == {"parameter", "optimizer_state", "gradient"}
    assert all(is_in_file(tensor) and tensor.shape == (2, 5) for tensor in in_files.values())
    assert not is_in_file(pinned)
    assert list(driver.pinned.values()) == [PAGE_BYTES]
    assert memory.bytes_by_category == {**dict.fromkeys(IN_FILES, 40), "activation": PAGE_BYTES}
    assert memory.file_bytes == memory.peak_file_bytes == 3 * 40
    del in_files
    assert memory.file_bytes == 0
    assert memory.peak_file_bytes == 3 * 40
    assert memory.place_of("gradient") == f"files in {disk_folder}"
    assert memory.place_of("activation") == "pinned host memory"


def test_nothing_needs_no_file(disk_folder):
    memory = HostMemory(CPU, files=MappedFiles(disk_folder))
    assert memory.allocate((0, 5), torch.float32, "parameter").shape == (0, 5)
    assert memory.file_bytes == 0


def test_the_disk_is_asked_for_what_lies_there_and_ram_for_the_rest(left, disk_folder):
    left(1000)
    memory = HostMemory(CPU, files=MappedFiles(disk_folder))
    memory.check(1001, "offload.optimizer=host", "Set optimizer.state=8bit.", "optimizer_state")
    memory.allocate(1001, torch.uint8, "gradient")
    with pytest.raises(DoesNotFitError, match=r"more in offload\.folder="):
        memory.check(2**60, "offload.optimizer=host", "Set optimizer.state=8bit.", "optimizer_state")
    with pytest.raises(DoesNotFitError, match="more host memory"):
        memory.allocate(1001, torch.uint8, "activation")


@pytest.fixture
def left(monkeypatch):
    """Set how many bytes the host has left."""

    def set_left(num_bytes):
        limit = HostLimit(num_bytes, "the machine has little available")
        monkeypatch.setattr(pinned_memory, "tightest_host_limit", lambda budget_bytes, file_bytes: limit)

    return set_left


def test_what_does_not_fit_is_refused_before_it_is_allocated(left):
    left(1000)
    memory = HostMemory(CPU)
    memory.check(1000, "offload.optimizer=host", "Set optimizer.state=8bit.")
    with pytest.raises(DoesNotFitError) as error:
        memory.check(1001, "offload.optimizer=host", "Set optimizer.state=8bit.")
    assert str(error.value) == (
        "offload.optimizer=host needs 1001 B more host memory, and the machine has little available, of which "
        "1000 B can be used. Set optimizer.state=8bit."
    )
    with StorageTracker() as tracker, pytest.raises(DoesNotFitError, match=r"Raise budget\.host"):
        memory.allocate(251, torch.float32)
    assert tracker.peak_bytes == 0


def test_a_trace_of_another_machine_has_no_limit(left):
    left(0)
    HostMemory(CPU, is_limited=False).allocate(10**6, torch.uint8)


def test_a_budget_is_of_resident_memory(monkeypatch):
    seen = []
    monkeypatch.setattr(
        pinned_memory,
        "tightest_host_limit",
        lambda budget, file_bytes: seen.append(budget) or HostLimit(10, ""),
    )
    HostMemory(CPU, budget_bytes=123).allocate(10, torch.uint8)
    assert seen == [123]
