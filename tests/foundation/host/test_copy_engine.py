"""Copies wait for what they need and for nothing else; pageable memory goes through buffers when it is waited for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lowmem_ft
from lowmem_ft.foundation.host import copy_engine
from lowmem_ft.foundation.host.copy_engine import SOURCES_KEPT, CopyEngine
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.replay.timing.clock import HOST_COPY_RATE, Clock

MIB = 2**20


def test_on_a_cpu_a_copy_is_done_when_it_returns():
    engine = CopyEngine(torch.device("cpu"))
    host, device = torch.arange(5.0), torch.zeros(5)
    engine.wait(engine.to_device(host, device))
    assert torch.equal(device, host)
    engine.to_host(device * 2, host).synchronize()
    assert host.tolist() == [0, 2, 4, 6, 8]
    engine.synchronize()
    engine.now().synchronize()


@pytest.fixture
def gpu():
    """A virtual GPU, its copy engine and pinned memory of 8 MiB."""
    with VirtualGPU("rtx-4090") as gpu:
        gpu.engine = CopyEngine(gpu.device)
        gpu.host = HostMemory(gpu.device, is_limited=False).allocate(8 * MIB, torch.uint8)
        yield gpu


def on_device(gpu):
    return torch.empty(8 * MIB, dtype=torch.uint8, device=gpu.device)


def compute(gpu):
    """A kernel that takes longer than a copy; its index in the log."""
    big = torch.empty(2**13, 2**13, device=gpu.device)
    torch.mm(big, big)
    return len(gpu.work.entries) - 1


def last_copy(gpu):
    return max(index for index, entry in enumerate(gpu.work.entries) if entry.kind == "copy")


def test_a_copy_waits_for_all_computing_before_it_unless_told_what_for(gpu):
    target = on_device(gpu)
    early = gpu.engine.now()
    kernel = compute(gpu)
    gpu.engine.to_device(gpu.host, target, after=[early])
    ahead = last_copy(gpu)
    gpu.engine.to_device(gpu.host, target)
    behind = last_copy(gpu)
    times = Clock(gpu.work.entries).times_on(gpu.spec)
    assert times.starts[ahead] < times.ends[kernel]
    assert times.starts[behind] >= times.ends[kernel]


def test_computing_waits_for_a_copy_only_when_told(gpu):
    target = on_device(gpu)
    arrived = gpu.engine.to_device(gpu.host, target)
    free = compute(gpu)
    late = gpu.engine.to_device(gpu.host, target)
    gpu.engine.wait(arrived)
    waited_for_first = compute(gpu)
    gpu.engine.wait(late)
    copy = last_copy(gpu)
    waited_for_second = compute(gpu)
    times = Clock(gpu.work.entries).times_on(gpu.spec)
    first_copy = min(index for index, entry in enumerate(gpu.work.entries) if entry.kind == "copy")
    assert times.starts[free] < times.ends[first_copy]
    assert times.starts[waited_for_first] >= times.ends[first_copy]
    assert times.starts[waited_for_second] >= times.ends[copy]


def test_both_directions_run_beside_each_other(gpu):
    gpu.engine.to_device(gpu.host, on_device(gpu), after=[])
    first = last_copy(gpu)
    gpu.engine.to_host(on_device(gpu), torch.empty_like(gpu.host, pin_memory=True), after=[])
    second = last_copy(gpu)
    times = Clock(gpu.work.entries).times_on(gpu.spec)
    assert times.starts[second] < times.ends[first]
    assert [gpu.work.entries[index].to_host for index in (first, second)] == [False, True]


def test_a_source_on_its_way_keeps_its_memory_until_computing_has_waited(gpu):
    before = gpu.recorder.live_bytes
    for _ in range(5):
        gpu.engine.to_host(on_device(gpu), gpu.host)
    assert gpu.recorder.live_bytes - before == SOURCES_KEPT * 8 * MIB
    waits = [entry for entry in gpu.work.entries if entry.kind == "wait" and entry.stream == 0]
    assert len(waits) == 5 - SOURCES_KEPT
    gpu.engine.synchronize()
    assert gpu.recorder.live_bytes == before


def test_a_source_that_the_caller_keeps_is_not_held(gpu):
    before = gpu.recorder.live_bytes
    gpu.engine.to_host(on_device(gpu), gpu.host, keep=False)
    assert gpu.recorder.live_bytes == before


def test_no_copy_of_pinned_memory_holds_the_host(gpu):
    gpu.engine.wait(gpu.engine.to_device(gpu.host, on_device(gpu)))
    gpu.engine.to_host(on_device(gpu), gpu.host)
    assert not any(entry.blocking or entry.kind == "synchronize" for entry in gpu.work.entries)


@pytest.fixture
def staging_engine(monkeypatch):
    """The engine of a GPU on this machine's memory: torch's streams of a CPU do everything at once."""
    monkeypatch.setattr(copy_engine, "kernels_of", lambda device: "cuda")
    return CopyEngine(torch.device("cpu"))


@pytest.mark.parametrize("num_elements", [1, 15, 16, 17, 100])
def test_pageable_memory_goes_through_small_buffers_and_arrives(staging_engine, monkeypatch, num_elements):
    monkeypatch.setattr(copy_engine, "STAGING_BYTES", 64)
    empty, buffers = torch.empty, []

    def counting(*shape, pin_memory=False, **options):
        made = empty(*shape, **options)
        if pin_memory:
            buffers.append(made)
        return made

    host, device = torch.randn(num_elements), torch.zeros(num_elements)
    monkeypatch.setattr(torch, "empty", counting)
    for _ in range(2):
        staging_engine.wait(staging_engine.to_device(host, device))
        assert torch.equal(device, host)
        staging_engine.to_host(device.mul_(2), host).synchronize()
        assert torch.equal(host, device)
    assert {buffer.nbytes for buffer in buffers} == {64}
    assert len(buffers) == (2 if num_elements <= 16 else 4)


def test_the_host_waits_before_it_touches_a_buffer_that_travels(monkeypatch):
    monkeypatch.setattr(copy_engine, "STAGING_BYTES", 64)
    with VirtualGPU("rtx-4090") as gpu:
        engine, pageable = CopyEngine(gpu.device), torch.empty(16 * 5)
        engine.to_device(pageable, torch.empty(16 * 5, device=gpu.device))
        engine.to_host(torch.empty(16 * 5, device=gpu.device), pageable).synchronize()
    kinds = [entry.kind for entry in gpu.work.entries if entry.kind in ("copy", "synchronize")]
    copy, wait = "copy", "synchronize"
    inward = [copy, copy, wait, copy, wait, copy, wait, copy]
    outward = kinds[len(inward) :]
    assert kinds[: len(inward)] == inward
    assert outward.count(copy) == 5
    assert outward[-1] == wait
    assert not any(entry.blocking for entry in gpu.work.entries)


@pytest.fixture
def pageable(gpu):
    """Memory on the host that is not pinned, as much as a copy of the virtual GPU's takes."""
    return torch.zeros(8 * MIB, dtype=torch.uint8)


def num_copies(gpu):
    return sum(entry.kind == "copy" for entry in gpu.work.entries)


def test_pageable_memory_is_copied_when_somebody_waits_and_not_before(gpu, pageable):
    """So the host reads, and waits, while the device does what it was given in between."""
    kernel, target = compute(gpu), on_device(gpu)
    early = gpu.engine.to_device(pageable, target, after=[])
    busy = compute(gpu)
    assert not num_copies(gpu)
    gpu.engine.wait(early)
    assert num_copies(gpu) == 1
    times = Clock(gpu.work.entries).times_on(gpu.spec)
    assert times.starts[last_copy(gpu)] < times.ends[kernel] < times.ends[busy]


def test_copies_that_were_put_off_are_made_in_their_order(gpu, pageable):
    gpu.engine.to_device(pageable, on_device(gpu))
    second = gpu.engine.to_host(on_device(gpu), pageable, keep=False)
    gpu.engine.to_device(pageable, on_device(gpu))
    second.synchronize()
    assert [entry.to_host for entry in gpu.work.entries if entry.kind == "copy"] == [False, True]
    gpu.engine.synchronize()
    assert num_copies(gpu) == 3


def test_a_copy_that_waits_for_another_engines_makes_that_first(gpu, pageable):
    other = CopyEngine(gpu.device)
    written = gpu.engine.to_host(on_device(gpu), pageable, keep=False)
    other.wait(other.to_device(pageable, on_device(gpu), after=[written]))
    assert [entry.to_host for entry in gpu.work.entries if entry.kind == "copy"] == [True, False]


def test_sources_that_are_forgotten_are_not_copied_any_more(gpu, pageable):
    before = gpu.recorder.live_bytes
    for _ in range(SOURCES_KEPT + 1):
        end = gpu.engine.to_host(on_device(gpu), pageable)
    gpu.engine.forget_sources()
    assert gpu.recorder.live_bytes == before
    gpu.engine.synchronize()
    end.synchronize()
    assert num_copies(gpu) == 1


def test_the_clock_counts_what_the_host_copies_itself(gpu, pageable):
    """A buffer of pinned memory is filled at HOST_COPY_RATE; the device has nothing to do meanwhile."""
    gpu.engine.wait(gpu.engine.to_device(pageable, on_device(gpu)))
    times = Clock(gpu.work.entries).times_on(gpu.spec)
    [fill] = [index for index, entry in enumerate(gpu.work.entries) if entry.kind == "host copy"]
    assert gpu.work.entries[fill].num_bytes == 8 * MIB
    assert times.ends[fill] - times.starts[fill] == pytest.approx(8 * MIB / HOST_COPY_RATE)
    assert times.starts[last_copy(gpu)] >= times.ends[fill]
    span = times.between(fill, fill + 1)
    assert span.bound_by == "host copies"


def test_nothing_in_the_package_uses_record_stream():
    sources = list(Path(lowmem_ft.__file__).parent.rglob("*.py"))
    assert len(sources) > 50
    callers = [
        source
        for source in sources
        if ".record_stream(" in source.read_text() and "virtual_gpu" not in source.parts
    ]
    assert callers == []


@pytest.mark.parametrize(
    "message", ["CUDA error: out of memory\nCUDA kernel errors ...", "CUDA error: unknown error"]
)
def test_where_no_buffer_can_be_pinned_copies_arrive_all_the_same_and_it_is_said(
    staging_engine, monkeypatch, caplog, message
):
    """A driver that pins little, as WSL's, may have nothing left; what else fails is not hidden."""
    empty = torch.empty

    def refusing(*shape, **options):
        if options.get("pin_memory"):
            raise RuntimeError(message)
        return empty(*shape, **options)

    engine, host, device = staging_engine, torch.randn(100), torch.zeros(100)
    monkeypatch.setattr(torch, "empty", refusing)
    if "unknown" in message:
        with pytest.raises(RuntimeError, match="unknown error"):
            engine.wait(engine.to_device(host, device))
        return
    monkeypatch.setattr(copy_engine, "STAGING_BYTES", 64)
    engine.wait(engine.to_device(host, device))
    assert torch.equal(device, host)
    engine.to_host(device.mul_(2), host).synchronize()
    assert torch.equal(host, device)
    (said,) = caplog.messages
    assert said.endswith("refused to pin a buffer of 64 B for them: CUDA error: out of memory.")
