"""What programs do with ``DTensor``: each operator that runs on this process's part is recorded, and no other."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lowmem_ft import VirtualGPU
from lowmem_ft.foundation.units import MIB
from lowmem_ft.foundation.upstream.torch_version import TORCH_VERSION
from lowmem_ft.virtual_gpu.costs.one_process import one_of_several

NUM_PROCESSES = 4
ROWS = 4096
PART_BYTES = 4 * (ROWS // NUM_PROCESSES) * 256
WHOLE_BYTES = NUM_PROCESSES * PART_BYTES
assert PART_BYTES == MIB


@pytest.fixture
def gpu():
    with one_of_several(NUM_PROCESSES, 0), VirtualGPU("rtx-4090") as gpu:
        yield gpu


def mesh():
    return init_device_mesh("cuda", (NUM_PROCESSES,))


def sharded():
    return distribute_tensor(torch.empty(ROWS, 256, device="cuda"), mesh(), [Shard(0)])


def new_bytes(gpu, make):
    """What a call leaves on the device, and the most that it has taken meanwhile."""
    before = gpu.recorder.live_bytes
    gpu.recorder.reset_peak()
    result = make()
    taken = gpu.recorder.live_bytes - before, gpu.recorder.peak_bytes - before
    del result
    return taken


OPERATORS = {
    "zeros_like": (lambda one: torch.zeros_like(one), PART_BYTES, PART_BYTES),
    "empty_like": (lambda one: torch.empty_like(one), PART_BYTES, PART_BYTES),
    "clone": (lambda one: one.clone(), PART_BYTES, PART_BYTES),
    "mul": (lambda one: one * one, PART_BYTES, PART_BYTES),
    "in place": (lambda one: one.mul_(2).add_(one), 0, 0),
    "foreach": (lambda one: torch._foreach_add([one, one], [one, one]), 2 * PART_BYTES, 2 * PART_BYTES),
    "bfloat16": (lambda one: one.to(torch.bfloat16), PART_BYTES // 2, PART_BYTES // 2),
    "view": (lambda one: one.view(-1), 0, 0),
    "to_local": (lambda one: one.to_local(), 0, 0),
    "dropout": (lambda one: nn.functional.dropout(one, 0.5, training=True), None, None),
    # Before torch 2.15 DTensor puts the state of random numbers on the device.
    "normal_": (lambda one: one.normal_(), 0, 0 if TORCH_VERSION >= (2, 15) else 16),
    "full_tensor": (lambda one: one.full_tensor(), WHOLE_BYTES, WHOLE_BYTES),
    "redistribute": (lambda one: one.redistribute(placements=[Replicate()]), WHOLE_BYTES, WHOLE_BYTES),
    "sum": (lambda one: one.sum().full_tensor(), 4, 8),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_takes_what_it_takes_on_the_part_of_this_process(gpu, name):
    call, left, _ = OPERATORS[name]
    one = sharded()
    if left is None:  # as of a tensor of the part's shape
        local = torch.empty(ROWS // NUM_PROCESSES, 256, device="cuda")
        assert new_bytes(gpu, lambda: call(one)) == new_bytes(gpu, lambda: call(local))
        return
    call(one)  # what is made once, such as the state of random numbers
    assert new_bytes(gpu, lambda: call(one)) == OPERATORS[name][1:]


def model():
    return nn.Sequential(*(nn.Linear(256, 256, bias=False, device="cuda") for _ in range(2)))


WEIGHT_BYTES = 2 * 4 * 256 * 256

ADAMW = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}, "default": {}}
OPTIMIZERS = {
    **{
        f"AdamW {name}": (lambda weights, how=how: torch.optim.AdamW(weights, **how), 2)
        for name, how in ADAMW.items()
    },
    "AdamW amsgrad": (lambda weights: torch.optim.AdamW(weights, amsgrad=True), 3),
    "Adagrad": (torch.optim.Adagrad, 1),
    "SGD": (lambda weights: torch.optim.SGD(weights, momentum=0.9), 1),
    "SGD without momentum": (torch.optim.SGD, 0),
    "RMSprop": (torch.optim.RMSprop, 1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_cut_weights_keeps_the_state_of_the_parts(gpu, name):
    make, tensors_per_weight = OPTIMIZERS[name]
    cut = model()
    for unit in (*cut, cut):
        fully_shard(unit, mesh=mesh())
    optimizer = make(cut.parameters())
    for _ in range(2):
        cut(torch.randn(8, 256, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = (one.size_bytes for one in alive(gpu, "device") if one.category == "optimizer_state")
    num_scalars = 2 * 4 * 2  # the counts of steps, which some keep on the device
    assert 0 <= sum(state) - tensors_per_weight * WEIGHT_BYTES // NUM_PROCESSES <= num_scalars


def alive(gpu, place):
    timeline = gpu.recorder.timeline
    allocations = (timeline.allocations[index] for index in timeline.alive_at(len(timeline.events) - 1))
    return [one for one in allocations if one.place == place]


def test_a_tensor_parallel_model_holds_its_part_of_everything(gpu):
    parallel = parallelize_module(model(), mesh(), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    optimizer = torch.optim.AdamW(parallel.parameters())
    parallel(torch.randn(8, 256, device="cuda")).sum().backward()
    optimizer.step()
    by_category = {
        category: sum(one.size_bytes for one in alive(gpu, "device") if one.category == category)
        for category in ("parameter", "gradient", "optimizer_state")
    }
    part = WEIGHT_BYTES // NUM_PROCESSES
    assert by_category == {"parameter": part, "gradient": part, "optimizer_state": 2 * part}
