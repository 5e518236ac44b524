"""The Triton kernel on virtual GPUs: what a trace counts for it, and when it takes it. No Triton is needed."""

import contextlib
import dataclasses
import itertools

import pytest
import torch
from torch import nn

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.foundation.memory.race import RaceError
from lowmem_ft.optimizers import OPTIMIZERS, ChunkedOptimizer
from lowmem_ft.optimizers.chunked import chunked_optimizer
from lowmem_ft.optimizers.updates.adamw import AdamW
from lowmem_ft.techniques.offload.optimizer_offload import enable_optimizer_offload
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

NUM_CHUNKS, CHUNK = 4, 2**16
MASTER_BYTES = {"weight": 0, "fp32": 4, "split16": 2, "split24": 1, "stochastic_rounding": 0, "none": 0}
STATE_BYTES = {"fp32": 4, "bf16": 2, "8bit": 1 + 4 / 256}
KERNEL = "update_in_triton"


class Mine(AdamW):
    """AdamW with whatever its author changes."""


def build(device, name="adamw", state="8bit", master="split24", rule=None):
    dtype = torch.float32 if master == "weight" else torch.bfloat16
    parameter = nn.Parameter(torch.zeros(NUM_CHUNKS * CHUNK, dtype=dtype, device=device))
    row = OPTIMIZERS[name]
    optimizer = ChunkedOptimizer(
        [parameter],
        rule or row.update_rule(),
        {"lr": 1e-3, "weight_decay": 0.1, **row.hyperparameters},
        state=state,
        master="fp32" if master == "weight" else master,
    )
    optimizer.chunk_elements = CHUNK
    optimizer.allocate_state()
    return parameter, optimizer


def update(spec, kernel="auto", **options):
    """The kernels of one update, each as often as it runs, and the bytes that it takes at the most."""
    gpu = VirtualGPU(spec, check_streams=True)
    with gpu:
        parameter, optimizer = build(gpu.device, **options)
        optimizer.kernel = kernel
        parameter.grad = torch.zeros_like(parameter)
        recorder = gpu.recorder
        recorder.reset_peak()
        before, num_entries = recorder.live_bytes, len(recorder.work.entries)
        optimizer.step()
        kernels = [work for work in recorder.work.entries[num_entries:] if work.kind == "kernel"]
        return [work for work in kernels for _ in range(work.times)], recorder.peak_bytes - before


@pytest.mark.parametrize("name,master", itertools.product(("adamw", "lion", "sgd"), MASTER_BYTES))
def test_an_update_moves_what_its_formats_hold_and_takes_no_memory(name, master):
    averages = 2 if name == "adamw" else 1
    weight = 4 if master == "weight" else 2
    mixed = {"exp_avg": "bf16", "exp_avg_sq": "8bit"}
    states = [*STATE_BYTES.items(), (mixed, (3 + 4 / 256) / 2)] if name == "adamw" else STATE_BYTES.items()
    for state, state_bytes in states:
        kernels, taken = update("a100-80gb", name=name, state=state, master=master)
        assert {work.name for work in kernels} == {KERNEL}
        assert len(kernels) <= 3 * NUM_CHUNKS
        own = 2 * (weight + MASTER_BYTES[master] + averages * state_bytes) + weight
        moved = sum(work.num_bytes for work in kernels) / (NUM_CHUNKS * CHUNK)
        assert 0.8 * own <= moved <= 1.2 * own
        assert taken == 0


@pytest.mark.parametrize("on_host", [False, True])
def test_one_launch_updates_a_parameter_unless_its_state_comes_from_the_host(on_host, monkeypatch):
    monkeypatch.setattr(chunked_optimizer, "GPU_CHUNK_ELEMENTS", CHUNK)
    with VirtualGPU("a100-80gb") as gpu:
        parameter, optimizer = build(gpu.device)
        optimizer.chunk_elements = None
        offload = (
            enable_optimizer_offload(optimizer, HostMemory(gpu.device, is_limited=False)) if on_host else None
        )
        parameter.grad = torch.zeros_like(parameter)
        before = len(gpu.recorder.work.entries)
        optimizer.step()
        kernels = [work for work in gpu.recorder.work.entries[before:] if work.name == KERNEL]
        if offload is not None:
            offload.remove()
    assert sum(work.times for work in kernels) == (NUM_CHUNKS if on_host else 1)
    assert not any(work.by_triton for work in kernels)  # for the host: the compiled kernel is launched itself


WITHOUT_TRITON = dataclasses.replace(find_gpu("a100-80gb"), has_triton=False)


@pytest.mark.parametrize(
    "spec,options",
    [
        ("t4", {}),
        (WITHOUT_TRITON, {}),
        ("a100-80gb", {"kernel": "eager"}),
        ("a100-80gb", {"rule": Mine()}),
    ],
    ids=["Turing", "without Triton", "told to", "a rule of one's own"],
)
def test_what_the_kernel_does_not_take_is_traced_operation_by_operation(spec, options):
    kernels, taken = update(spec, **options)
    assert KERNEL not in {work.name for work in kernels}
    assert len(kernels) > 3 * NUM_CHUNKS
    assert taken > 4 * CHUNK


def test_one_gpu_does_not_decide_for_the_next():
    """All of them are ``vgpu:0``."""
    found = [KERNEL in {work.name for work in update(spec)[0]} for spec in ("t4", "rtx-4090", "t4")]
    assert found == [False, True, False]


def test_demanding_it_is_refused_where_the_real_gpu_would():
    assert update("a100-80gb", kernel="triton")[0]
    with pytest.raises(UserError, match=r"needs compute capability 8.0, cuda:0 has 7.5"):
        update("t4", kernel="triton")
    with pytest.raises(UserError, match="Triton is not installed"):
        update(WITHOUT_TRITON, kernel="triton")


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("what", ["gradient", "exp_avg", "exp_avg_sq_scale", "low", "weight"])
def test_what_it_reads_and_writes_is_looked_at_for_races(what, waits):
    """Another stream writes what it only reads, or reads what it writes."""
    gpu = VirtualGPU("a100-80gb", check_streams=True)
    with pytest.raises(RaceError) if not waits else contextlib.nullcontext(), gpu:
        parameter, optimizer = build(gpu.device)
        parameter.grad = torch.zeros_like(parameter)
        tensors = {"gradient": parameter.grad, "weight": parameter.data, **optimizer.state[parameter]}
        elsewhere = torch.empty_like(tensors[what])
        source, target = (elsewhere, tensors[what]) if what == "gradient" else (tensors[what], elsewhere)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            target.copy_(source)
        if waits:
            torch.cuda.current_stream().wait_stream(stream)
        optimizer.step()
        torch.cuda.synchronize()
