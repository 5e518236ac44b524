"""The recorder writes down each storage once: when it is born, what it is for, where it lies and when it dies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowmem_ft.optimizers.formats.operators  # noqa: F401 - registers them
from lowmem_ft.foundation.repetition import rounds
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine


@pytest.fixture
def machine():
    with TracingMachine() as machine:
        yield machine


def sizes(machine, kind):
    timeline = machine.recorder.timeline
    return [
        timeline.allocations[event.allocation].size_bytes for event in timeline.events if event.kind == kind
    ]


def test_births_and_deaths_are_in_the_programs_order(machine):
    first, second, third = torch.empty(1), torch.empty(2), torch.empty(3)
    del second
    del first
    fourth = torch.empty(4)
    del third, fourth
    assert sizes(machine, "malloc") == [4, 8, 12, 16]
    assert sizes(machine, "free")[:2] == [8, 4]
    kinds = [event.kind for event in machine.recorder.timeline.events]
    assert kinds == ["malloc"] * 3 + ["free"] * 2 + ["malloc"] + ["free"] * 2


def test_views_and_in_place_operators_allocate_nothing(machine):
    values = torch.empty(4, 4)
    values.t().reshape(-1)[2:].view(2, -1)
    values.add_(1).detach().unsqueeze(0)
    assert sizes(machine, "malloc")[0] == 64
    assert machine.recorder.live_bytes == 64


@pytest.mark.parametrize("resize", [lambda t: t.resize_(100), lambda t: t.untyped_storage().resize_(400)])
def test_a_resized_storage_is_its_new_size(machine, resize):
    values = torch.empty(10)
    resize(values)
    values.add_(0)
    assert machine.recorder.live_bytes == 400
    del values
    assert machine.recorder.live_bytes == 0


def test_what_is_freed_after_the_block_lived_to_its_end():
    with TracingMachine() as machine:
        values = torch.empty(10)
    before = len(machine.recorder.timeline.events)
    del values
    assert len(machine.recorder.timeline.events) == before


def test_the_host_is_not_the_device():
    with VirtualGPU("t4") as gpu:
        host = torch.empty(10)
        device = torch.empty(20, device="cuda")
        assert gpu.recorder.live_bytes == device.nbytes
    assert [item.place for item in gpu.recorder.timeline.allocations] == ["host", "device"]
    assert host.nbytes == gpu.recorder.timeline.allocations[0].size_bytes


def test_a_librarys_workspace_is_held_once_for_each_stream():
    with VirtualGPU("a100-80gb") as gpu:
        stream = torch.cuda.Stream()
        left = torch.randn(64, 64, device="cuda")
        for _ in range(2):
            left @ left
            with torch.cuda.stream(stream):
                left @ left
    workspaces = [item for item in gpu.recorder.timeline.allocations if item.category == "workspace"]
    assert len(workspaces) == 2
    assert len({item.stream for item in workspaces}) == 2


def test_memory_comes_from_the_pool_of_the_stream_that_asks():
    with VirtualGPU("t4") as gpu:
        stream = torch.cuda.Stream()
        torch.empty(1, device="cuda")
        with torch.cuda.stream(stream):
            torch.empty(2, device="cuda")
    assert [item.stream for item in gpu.recorder.timeline.allocations] == [0, stream.id]


def test_peaks_begin_anew_where_asked():
    with VirtualGPU("t4"):
        torch.empty(1000, device="cuda")
        assert torch.cuda.max_memory_allocated() == 4000
        torch.cuda.reset_peak_memory_stats()
        kept = torch.empty(10, device="cuda")
        assert torch.cuda.max_memory_allocated() == kept.nbytes


def test_gradients_and_optimizer_state_belong_to_their_parameters_module():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 16, bias=False))
    with TracingMachine() as machine:
        machine.place(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        found = {
            (item.category, item.module, item.size_bytes)
            for item in machine.recorder.timeline.allocations
            if item.category in ("parameter", "gradient", "optimizer_state") and item.size_bytes > 4
        }
    bytes_of = {"0": 8 * 8 * 4, "1": 8 * 16 * 4}
    assert found == {
        (category, module, size)
        for category in ("parameter", "gradient", "optimizer_state")
        for module, size in bytes_of.items()
    }


def test_what_a_round_leaves_behind_counts_once_for_each_round_until_it_goes():
    with VirtualGPU("t4") as gpu:
        buffers, live_bytes = [], []
        for _ in rounds(range(7)):
            buffers.append(torch.empty(10, pin_memory=True))
            gpu.take_host_memory(buffers[-1], "activation")
            live_bytes.append(list(gpu.recorder.timeline.live_bytes(("pinned",)))[-1])
        while buffers:
            buffers.pop()
            live_bytes.append(list(gpu.recorder.timeline.live_bytes(("pinned",)))[-1])
    assert live_bytes == [64, 384, 448, 384, 64, 0]  # torch pins powers of two


def test_shared_memory_belongs_to_the_module_whose_weights_were_copied_there_last():
    with VirtualGPU("t4") as gpu:
        slot = torch.empty(8, device="cuda")
        gpu.mark(slot, "parameter")
        assert not gpu.recorder.module_of(slot)
        for name in ("layers.0", "layers.1"):
            weights = torch.empty(8)
            gpu.recorder.mark(weights, "parameter", name)
            slot.copy_(weights)
            assert gpu.recorder.module_of(slot) == name
        slot.copy_(torch.empty(8))  # no weights
        assert gpu.recorder.module_of(slot) == "layers.1"


def test_what_an_update_is_made_with_belongs_to_the_module_of_its_parameter():
    """A gradient that waited on the host says nothing of where it comes from."""
    layer = nn.Linear(16, 16, bias=False)
    layer.weight.data = layer.weight.data.bfloat16()
    with VirtualGPU("l4") as gpu:
        model = gpu.place(nn.ModuleDict({"layer": layer}))
        with gpu.during("optimizer_step"):
            value = torch.empty(256, pin_memory=True).to("cuda", non_blocking=True)
            assert not gpu.recorder.module_of(value)
            torch.ops.lowmem_ft.write_nearest(value, model["layer"].weight.detach().view(-1))
            assert gpu.recorder.module_of(value) == "layer"
