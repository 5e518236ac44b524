"""The process group of a run: which tensors it can send, and how a process leaves it."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed
from accelerate.state import AcceleratorState, PartialState
from torch.distributed import HashStore, distributed_c10d

from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.processes.error_propagation import ending_together, leave_processes
from lowmem_ft.training.runtimes.accelerate_runtime import backend_of, launched_runtime


@pytest.mark.parametrize(
    "settings, backend",
    [
        (("distributed.strategy=fsdp2",), None),
        (("distributed.strategy=fsdp2", "distributed.cpu_offload=true"), "cuda:nccl,cpu:gloo"),
        (("distributed.strategy=ddp", "offload.optimizer=host"), "cuda:nccl,cpu:gloo"),
        (("distributed.strategy=ddp", "offload.optimizer=host", "training.use_cpu=true"), None),
    ],
)
def test_what_is_on_the_host_can_be_sent_and_the_group_is_told_so(settings, backend, tmp_path, monkeypatch):
    recipe = load_recipe("tiny", ["distributed.num_processes=2", *settings])
    assert backend_of(recipe) == backend
    if recipe.training.use_cpu:
        return

    class Joined(Exception):
        pass

    def join(**kwargs):
        raise Joined(kwargs)

    launch = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    for state in (AcceleratorState, PartialState):
        monkeypatch.setattr(state, "_shared_state", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "init_process_group", join)
    with pytest.raises(Joined) as joined:
        launched_runtime(recipe.training, tmp_path, recipe.distributed, backend=backend_of(recipe))
    assert joined.value.args[0]["backend"] == (backend or "nccl")


@pytest.mark.parametrize(
    "backend, fails, left_by",
    [
        ("cpu:gloo,cuda:nccl", True, "abort"),
        ("cpu:gloo,cuda:nccl", False, "destroy"),
        ("cpu:gloo,cuda:gloo", True, "destroy"),
    ],
)
def test_a_group_of_nccl_is_aborted_after_an_error(backend, fails, left_by, monkeypatch):
    left = []
    for owner, name, value in (
        (torch.distributed, "is_initialized", lambda: True),
        (torch.distributed, "get_backend_config", lambda: backend),
        (torch.distributed, "get_rank", lambda: 0),
        (torch.distributed, "destroy_process_group", lambda: left.append("destroy")),
        (distributed_c10d, "_abort_process_group", lambda: left.append("abort")),
        (distributed_c10d, "_get_default_store", HashStore),
    ):
        monkeypatch.setattr(owner, name, value)
    with contextlib.suppress(ValueError), ending_together():
        if fails:
            raise ValueError("broken")
    leave_processes()
    assert left == [left_by]
