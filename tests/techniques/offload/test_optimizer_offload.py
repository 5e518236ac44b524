"""State on the host changes where bytes are and when they move, and no number."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from lowmem_ft.foundation.errors import DoesNotFitError
from lowmem_ft.foundation.host import pinned_memory
from lowmem_ft.foundation.host.pinned_memory import PAGE_BYTES, HostMemory
from lowmem_ft.foundation.system.host_limits import HostLimit
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.optimizers import OPTIMIZERS, OptimizerConfig, create_optimizer
from lowmem_ft.techniques.offload import optimizer_offload
from lowmem_ft.techniques.offload.optimizer_offload import NUM_SLOTS, HostStorage, enable_optimizer_offload
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.replay.timing.clock import Clock

CPU = torch.device("cpu")
CHUNK = 512
FORMATS = [
    ("fp32", "fp32"),
    ("fp32", "split16"),
    ("bf16", "split24"),
    ("8bit", "split24"),
    ("8bit", "stochastic_rounding"),
]


def model(dtype=torch.bfloat16, device="cpu"):
    """Parameters of many chunks, of a part of one and of an odd length."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 33), nn.LayerNorm(33))
    return layers.to(device, dtype)


def optimizer_of(module, *, name="adamw", state="fp32", **config):
    config["state"] = state if OPTIMIZERS[name].takes_state_formats else "fp32"
    optimizer = create_optimizer(module, OptimizerConfig(name=name, **config), learning_rate=1e-2)
    optimizer.chunk_elements = CHUNK
    return optimizer


def train(module, optimizer, steps=3):
    torch.manual_seed(1)
    for _ in range(steps):
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape).to(parameter.dtype).to(parameter.device)
        optimizer.step()
    optimizer.zero_grad()


def numbers(module, optimizer):
    """Weights and everything that the optimizer keeps."""
    state = [value for kept in optimizer.state.values() for _, value in sorted(kept.items())]
    return [*module.parameters(), *(torch.as_tensor(value) for value in state)]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adafactor"])
@pytest.mark.parametrize("state,master", FORMATS)
def test_weights_and_state_are_bitwise_those_of_the_device(name, state, master):
    results = []
    for on_host in (False, True):
        module = model()
        optimizer = optimizer_of(module, name=name, state=state, master=master)
        if on_host:
            enable_optimizer_offload(optimizer, HostMemory(CPU))
        train(module, optimizer)
        results.append([tensor.clone() for tensor in numbers(module, optimizer)])
    assert same(*results)


def test_float32_weights_too_and_the_state_moves_at_any_time():
    plain, moved = model(torch.float32), model(torch.float32)
    optimizer, other = optimizer_of(plain), optimizer_of(moved)
    train(plain, optimizer, steps=5)
    train(moved, other, steps=0)
    torch.manual_seed(1)

    def steps(number):
        for _ in range(number):
            for parameter in moved.parameters():
                parameter.grad = torch.randn(parameter.shape)
            other.step()

    steps(2)
    home = other.home
    with enable_optimizer_offload(other, HostMemory(CPU)):
        assert other.home is not home
        steps(1)
    assert other.home is home
    steps(2)
    assert same(numbers(plain, optimizer), numbers(moved, other))


def test_the_host_holds_the_states_bytes_and_the_device_three_chunks():
    module = model()
    with StorageTracker() as tracker:
        optimizer = optimizer_of(module, state="8bit", master="split24")
        memory = HostMemory(CPU)
        before = tracker.live_bytes
        handle = enable_optimizer_offload(optimizer, memory)
        taken = tracker.live_bytes - before
        tracker.reset_peak()
        train(module, optimizer)
        grown = tracker.live_bytes - before - taken
    low = averages = scales = 0
    for parameter in module.parameters():
        low += parameter.numel()
        averages += 2 * parameter.numel()
        scales += 2 * 4 * -(-parameter.numel() // 256)
    assert memory.bytes_by_category["optimizer_state"] == low + averages + scales
    chunk = (
        3 * CHUNK + 2 * 256
    )  # a byte for each part, and two rows of scales that begin at multiples of 256 bytes
    assert taken == low + averages + scales + NUM_SLOTS * chunk
    assert grown == 0
    handle.remove()
    assert memory.bytes_by_category["optimizer_state"] == 0


def test_a_chunk_larger_than_the_slots_makes_them_grow(monkeypatch):
    monkeypatch.setattr(optimizer_offload, "_part", lambda kept, share: {})
    plain, offloaded = model(), model()
    optimizer, other = optimizer_of(plain), optimizer_of(offloaded)
    enable_optimizer_offload(other, HostMemory(CPU))
    train(plain, optimizer)
    train(offloaded, other)
    assert same(numbers(plain, optimizer), numbers(offloaded, other))


def test_too_little_host_memory_is_refused_before_any_is_taken(monkeypatch):
    monkeypatch.setattr(
        pinned_memory,
        "tightest_host_limit",
        lambda budget, file_bytes: HostLimit(1000, "the process holds 3 GiB"),
    )
    optimizer = optimizer_of(model())
    with (
        StorageTracker() as tracker,
        pytest.raises(
            DoesNotFitError, match=r"offload\.optimizer=host needs .* Keep less \(optimizer\.state=8bit"
        ),
    ):
        enable_optimizer_offload(optimizer, HostMemory(CPU))
    assert tracker.peak_bytes == 0
    assert not optimizer.state
    train(model(), optimizer)


# --- on a virtual GPU: streams, events, bytes and time ----------------------------------------------------------------

MILLION = 2**20


@pytest.fixture
def gpu():
    """A card whose link is far slower than its memory."""
    with VirtualGPU("rtx-4090") as gpu:
        yield gpu


def visits(gpu, num_chunks, elements=MILLION):
    """State of so many chunks that was updated twice; for each visit the indices of its copies in the log."""
    home = HostStorage(HostMemory(gpu.device, is_limited=False))
    state = home.allocate(num_chunks * elements, torch.float32, gpu.device)
    rounds = []
    for _ in range(2):
        begin = len(gpu.work.entries)
        for chunk in home.visit(({"state": part} for part in state.split(elements)), gpu.device):
            chunk["state"].add_(1)
        copies = [
            (index, entry)
            for index, entry in enumerate(gpu.work.entries)
            if index >= begin and entry.kind == "copy"
        ]
        rounds.append(
            (
                [index for index, entry in copies if not entry.to_host],
                [index for index, entry in copies if entry.to_host],
            )
        )
    return rounds


def test_a_slot_is_not_written_before_its_last_chunk_has_left_it(gpu):
    num_chunks = 7
    rounds = visits(gpu, num_chunks)
    for entry in gpu.work.entries:
        if entry.to_host:  # a slow way home, so that it is the ring that waits
            entry.num_bytes *= 5
    times = Clock(gpu.work.entries).times_on(gpu.spec)
    inward = [index for one_round in rounds for index in one_round[0]]
    outward = [index for one_round in rounds for index in one_round[1]]
    assert len(inward) == len(outward) == 2 * num_chunks
    for arrives, leaves in zip(inward[NUM_SLOTS:], outward, strict=False):
        assert times.starts[arrives] >= times.ends[leaves]


def test_a_chunk_is_not_fetched_again_before_it_is_home(gpu):
    """The link to the host is the slower one here: it is still busy when the next step begins."""
    (_, outward), (inward, _) = visits(gpu, 2)
    times = Clock(gpu.work.entries).times_on(gpu.spec)
    assert all(times.starts[inward[0]] >= times.ends[index] for index in outward)


def test_updates_wait_for_their_chunk_and_copies_home_for_the_update(gpu):
    ((inward, outward), _) = visits(gpu, 5)
    kernels = [
        index
        for index, entry in enumerate(gpu.work.entries)
        if entry.name == "add_" and entry.kind == "kernel"
    ]
    times = Clock(gpu.work.entries).times_on(gpu.spec)
    for arrives, kernel, leaves in zip(inward, kernels, outward, strict=False):
        assert times.ends[arrives] <= times.starts[kernel]
        assert times.ends[kernel] <= times.starts[leaves]


def test_both_directions_and_the_update_overlap(gpu):
    (inward, outward), _ = visits(gpu, 40)
    times = Clock(gpu.work.entries).times_on(gpu.spec)
    took = times.ends - times.starts
    copying = sum(took[index] for index in (*inward, *outward))
    from_begin_to_end = times.ends[outward[-1]] - times.starts[inward[0]]
    assert from_begin_to_end < 0.6 * copying


def test_the_host_never_waits_before_the_state_goes(gpu):
    visits(gpu, 5)
    *visiting, going = gpu.work.entries
    assert not any(entry.blocking or entry.kind == "synchronize" for entry in visiting)
    assert going.kind == "synchronize"


def test_state_is_pinned_and_the_device_holds_three_chunks(gpu):
    before = gpu.recorder.live_bytes
    visits(gpu, 7)
    allocations = gpu.trace().timeline.allocations
    assert [a.size_bytes for a in allocations if a.place == "pinned"] == [7 * MILLION * 4]
    assert gpu.recorder.peak_bytes - before <= NUM_SLOTS * MILLION * 4
    assert PAGE_BYTES < MILLION


def test_the_host_waits_for_state_that_is_to_be_read(gpu):
    optimizer = optimizer_of(model(device=gpu.device))
    handle = enable_optimizer_offload(optimizer, HostMemory(gpu.device, is_limited=False))
    train_on(gpu, optimizer)
    begin = len(gpu.work.entries)
    handle.flush()
    assert any(entry.kind == "synchronize" for entry in itertools.islice(gpu.work.entries, begin, None))


def train_on(gpu, optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
