"""Runs whose weights, state and gradients wait in files are bitwise those with all of it in RAM."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from sweeps import few_quick
from tiny_models import save_llama

from lowmem_ft import VirtualGPU
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.host.copy_engine import PutOffCopy
from lowmem_ft.foundation.host.mapped_files import is_in_file
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.foundation.memory.allocator.allocator_config import AllocatorConfig
from lowmem_ft.foundation.memory.uncertainty import HEAP_SHARE_OF_RUNS
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.estimator.traces.tracing import trace_recipe
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.run.loop import train
from lowmem_ft.training.runtimes import build
from lowmem_ft.virtual_gpu.replay.shared_replays import Replays
from lowmem_ft.virtual_gpu.replay.trace_estimate import EstimateContext, step_time

HOST_STATE = ("offload.optimizer=host",)
STREAMED = (
    *HOST_STATE,
    "offload.parameters=stream",
    "optimizer.in_backward=true",
    "accumulation.order=vertical",
)
COMPACT = ("model.dtype=bfloat16", "optimizer.master=split24", "optimizer.state=8bit")
FROZEN = ("offload.parameters=stream", "adapter.name=lora")
RUNS = {
    "state alone": HOST_STATE,
    "clipped": STREAMED,
    "not clipped, compact": (
        *STREAMED,
        *COMPACT,
        "training.max_grad_norm=null",
        "offload.activations=inputs",
    ),
    "adapters": (*FROZEN, "offload.optimizer=host"),
    "adapters over 4 bits": (*FROZEN, "model.quantization=nf4"),
}
SHORT = (
    "training.max_steps=6",
    "training.save_steps=3",
    "training.eval_steps=3",
    "training.learning_rate=1e-3",
)


@pytest.fixture
def sessions(monkeypatch):
    """Every session that is built."""
    built, session_class = [], build.Session
    monkeypatch.setattr(build, "Session", lambda **parts: built.append(session_class(**parts)) or built[-1])
    return built


def seconds_of_a_step(folder, *settings):
    gpu = find_gpu("a100-80gb")
    rows = ("training.per_device_train_batch_size=4", "training.gradient_accumulation_steps=16")
    shape = ("data.max_length=2048", *rows, "checkpointing.mode=full")
    recipe = load_recipe(None, [f"model={folder}", "data=any", *shape, *STREAMED, *COMPACT, *settings])
    traced = trace_recipe(recipe, lambda: VirtualGPU(gpu))
    step = step_time(Replays(traced.trace, AllocatorConfig()), gpu, EstimateContext())
    return step.seconds


def test_the_device_works_while_the_host_reads_files(tmp_path, disk_folder, monkeypatch):
    save_llama(tmp_path, layers=4, hidden=2048, inner=4096, heads=16, vocab_size=1000)
    pinned = seconds_of_a_step(tmp_path)
    in_files = seconds_of_a_step(tmp_path, f"offload.folder={disk_folder}")
    assert in_files > pinned
    put_off = PutOffCopy.__init__

    def made_at_once(copy, *args):
        put_off(copy, *args)
        copy.make()

    monkeypatch.setattr(PutOffCopy, "__init__", made_at_once)
    assert in_files - pinned < 0.9 * (seconds_of_a_step(tmp_path, f"offload.folder={disk_folder}") - pinned)


def weights_of(folder):
    [file] = (folder / "model").glob("*model.safetensors")
    return load_file(file)


def assert_same_weights(one, other):
    ours, theirs = weights_of(one), weights_of(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "run", few_quick(RUNS, ["state alone", "not clipped, compact", "adapters over 4 bits"])
)
def test_a_run_with_files_is_the_run_without(run, tiny, metrics, sessions, disk_folder, tmp_path):
    if "adapters" in run:
        pytest.importorskip("peft")
        pytest.importorskip("bitsandbytes")
    plain, in_files = tmp_path / "plain", tmp_path / "in_files"
    train(tiny(*RUNS[run], *SHORT, output_dir=plain))
    before = os.listdir(disk_folder)
    train(tiny(*RUNS[run], *SHORT, f"offload.folder={disk_folder}", output_dir=in_files))
    for key in ("loss", "grad_norm"):
        assert metrics(in_files, key) == metrics(plain, key)
    assert_same_weights(in_files, plain)
    assert set(os.listdir(disk_folder)) - {"in_files"} == set(before)
    in_ram, on_disk = (session.host_memory for session in sessions)
    assert in_ram.peak_file_bytes == 0
    assert on_disk.peak_file_bytes > 0


def test_all_that_waits_for_a_visit_is_in_files(tiny, sessions, disk_folder, monkeypatch):
    allocated, allocate = {}, HostMemory.allocate

    def note(memory, shape, dtype, category="temporary"):
        tensor = allocate(memory, shape, dtype, category)
        allocated.setdefault(category, set()).add(is_in_file(tensor))
        return tensor

    monkeypatch.setattr(HostMemory, "allocate", note)
    settings = (
        *STREAMED,
        "offload.activations=inputs",
        "training.max_steps=1",
        f"offload.folder={disk_folder}",
    )
    train(tiny(*settings))
    assert allocated == {
        "parameter": {True},
        "optimizer_state": {True},
        "gradient": {True},
        "activation": {False},
    }


KILL_ITSELF = """
import os, signal, sys
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.run.loop import train
from lowmem_ft.training.folder.run_folder import RunFolder

write = RunFolder.write_metrics

def write_and_die(self, record):
    write(self, record)
    if record["step"] == 5 and "loss" in record:
        os.kill(os.getpid(), signal.SIGKILL)

RunFolder.write_metrics = write_and_die
train(load_recipe("tiny", sys.argv[1:]))
"""


def test_a_killed_run_leaves_no_file_and_goes_on_bit_for_bit(tiny, metrics, disk_folder, forks, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    settings = (*STREAMED, *COMPACT, *SHORT, "training.use_cpu=true", f"offload.folder={disk_folder}")
    before = {*os.listdir(disk_folder), "whole", "killed"}
    done = forks.run(KILL_ITSELF, *settings, f"training.output_dir={killed}")
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert set(os.listdir(disk_folder)) <= before
    train(tiny(*settings, output_dir=whole))
    train(tiny(*settings, "training.resume_from_checkpoint=auto", output_dir=killed))
    assert metrics(killed) == metrics(whole)
    assert_same_weights(killed, whole)


def places_of(estimate, category):
    allocations = estimate.timeline.allocations
    return {allocation.place for allocation in allocations if allocation.category == category}


def test_an_estimate_says_what_lies_on_disk_and_is_not_pinned(tiny):
    estimate = partial(estimate_memory, gpu="rtx-4090")
    settings = (*STREAMED, *COMPACT, "offload.activations=inputs")
    in_ram = estimate(tiny(*settings))
    in_files = estimate(tiny(*settings, "offload.folder=/not/on/this/machine"))
    assert in_ram.disk_peak_bytes == 0
    assert in_files.to_json()["host"]["disk_bytes"] == in_files.disk_peak_bytes > 0
    assert in_files.allocated_peak_bytes == in_ram.allocated_peak_bytes
    assert places_of(in_ram, "optimizer_state") == {"pinned"}
    assert places_of(in_files, "optimizer_state") == {"disk"}
    assert in_files.disk_peak_bytes >= 2 * in_ram.model.parameters
    assert "time of reading and writing offload.folder" in in_files.not_modelled


def test_on_a_cpu_too_files_are_not_resident_memory(tiny):
    in_ram = estimate_memory(tiny(*STREAMED), gpu="cpu")
    in_files = estimate_memory(tiny(*STREAMED, "offload.folder=/not/on/this/machine"), gpu="cpu")
    assert in_files.disk_peak_bytes > 0
    less = in_ram.process_peak_bytes - in_files.process_peak_bytes
    of_the_heap = HEAP_SHARE_OF_RUNS * in_files.disk_peak_bytes  # it keeps nothing of what lies in files
    assert less == pytest.approx(in_files.disk_peak_bytes + of_the_heap, abs=1)
