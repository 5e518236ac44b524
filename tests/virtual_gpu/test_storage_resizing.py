"""Storages that change their size under their tensors take as many bytes as real ones do."""

from __future__ import annotations

import pytest
import torch
import torch._inductor  # noqa: F401
from torch import nn

from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine


def storage_resized(device):
    weight = torch.empty(1024, device=device)
    for size in (0, 4096, 2048, 2048, 8192, 0):
        weight.untyped_storage().resize_(size)
        yield
    del weight
    yield


def typed_storage_resized(device):
    weight = torch.empty(1024, device=device)
    for size in (0, 512, 2048):
        weight._typed_storage()._resize_(size)
        yield


def resized_by_inductor(device):
    weight = torch.empty(1024, device=device)
    for size in (0, 4096, 8192):
        torch.ops.inductor.resize_storage_bytes_(weight, size)
        yield


def tensor_resized(device):
    hidden = torch.empty(1024, device=device)
    for size in (2048, 10, 4096):
        hidden.resize_(size)
        yield
    yield hidden.resize_as_(torch.empty(5000, device=device))


def made_larger_by_out(device):
    out = torch.empty(16, device=device)
    yield torch.add(torch.ones(1024, device=device), 1, out=out.resize_(0))
    yield torch.add(torch.ones(4096, device=device), 1, out=out.resize_(0))


def storage_of_another(device):
    hidden, other = torch.empty(1024, device=device), torch.empty(2048, device=device)
    yield hidden.set_(other)
    del other
    yield
    yield hidden.set_(torch.empty(16, device=device).untyped_storage(), 0, (4,), (1,))
    yield hidden.set_()


def data_swapped(device):
    hidden = torch.empty(1024, device=device)
    hidden.data = torch.empty(16, device=device)
    yield
    hidden.data = hidden.data.half()
    yield


def tensors_swapped(device):
    hidden, other = torch.empty(1024, device=device), torch.empty(16, device=device)
    torch.utils.swap_tensors(hidden, other)
    del other
    yield
    del hidden
    yield


def activation_dropped_and_brought_back(device):
    """What an operator has saved goes after its forward, and is there again for its backward."""
    weight = nn.Parameter(torch.empty(4096, device=device))
    hidden = weight * 2
    loss = hidden.sin().sum()
    hidden.untyped_storage().resize_(0)
    yield
    hidden.untyped_storage().resize_(4096 * 4)
    yield
    yield loss.backward()


PROGRAMS = [
    storage_resized,
    typed_storage_resized,
    resized_by_inductor,
    tensor_resized,
    made_larger_by_out,
    storage_of_another,
    data_swapped,
    tensors_swapped,
    activation_dropped_and_brought_back,
]


def bytes_of(program, watch, counters, device) -> list[int]:
    with watch:
        live = [counters.live_bytes for _ in program(device)]
    return [*live, counters.peak_bytes]


def by_tracker(program) -> list[int]:
    tracker = StorageTracker()
    return bytes_of(program, tracker, tracker, "cpu")


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_trace_has_the_bytes_of_real_storages(program):
    machine, gpu = TracingMachine(), VirtualGPU("t4")
    real = by_tracker(program)
    assert bytes_of(program, machine, machine.recorder, "cpu") == real
    assert bytes_of(program, gpu, gpu.recorder, "cuda") == real


def test_a_resized_storage_is_there_twice_while_it_is_copied():
    live = [0, 4096, 2048, 2048, 8192, 0, 0]
    assert by_tracker(storage_resized) == [*live, 2048 + 8192]


def test_resizing_copies_what_both_sizes_hold():
    with VirtualGPU("t4") as gpu:
        for _ in storage_resized("cuda"):
            pass
    copies = [entry.num_bytes for entry in gpu.work.entries if entry.name == "resize_"]
    assert copies == [2 * 2048, 2 * 2048]


def test_what_a_storage_is_for_stays_when_it_comes_back():
    with VirtualGPU("t4") as gpu:
        model = nn.Linear(512, 512, bias=False).cuda()
        model(torch.empty(1, 512, device="cuda"))
        for size in (0, 512 * 512 * 4):
            model.weight.untyped_storage().resize_(size)
    assert gpu.report().by_category_at_peak["parameter"] == 512 * 512 * 4


def test_torch_is_as_before():
    resize = torch.UntypedStorage.resize_
    with VirtualGPU("t4"), StorageTracker():
        assert torch.UntypedStorage.resize_ is not resize
    assert torch.UntypedStorage.resize_ is resize
    assert "resize_" not in vars(torch.UntypedStorage)
