"""What ``accelerate launch`` was asked for and has not started is started, or refused."""

from __future__ import annotations

import os
import sys
import types

import psutil
import pytest

from lowmem_ft.cli.processes.cpu_launch import start_requested_processes
from lowmem_ft.foundation.errors import UserError


@pytest.fixture
def below(monkeypatch, tmp_path):
    """Starts what a process below ``accelerate launch`` with these options starts; returns the words of it."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "False")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "lowmem_ft", "train", "recipe=tiny"])

    def start(*options, use_cpu):
        if "--cpu" in options:
            monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
        command = ["python", "/bin/accelerate", "launch", *options, "-m", "lowmem_ft", "train", "recipe=tiny"]
        parent = types.SimpleNamespace(cmdline=lambda: command)
        monkeypatch.setattr(psutil, "Process", lambda: types.SimpleNamespace(parent=lambda: parent))
        started = []
        monkeypatch.setattr(os, "execv", lambda program, words: started.append(words[1:]))
        start_requested_processes(use_cpu=use_cpu)
        return started[0] if started else None

    return start


TWO_BY_TORCHRUN = [
    *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
    *("-m", "lowmem_ft", "train", "recipe=tiny"),
]


@pytest.mark.parametrize(
    "options,use_cpu",
    [(("--cpu", "--num_processes", "2"), False), (("--num-processes=2",), True)],
)
def test_several_on_the_processor_are_started_by_torchrun(options, use_cpu, below):
    assert below(*options, use_cpu=use_cpu) == TWO_BY_TORCHRUN


@pytest.mark.parametrize("distributed_type", ["'NO'", "MULTI_CPU"])
def test_a_configuration_asks_as_well(distributed_type, below, tmp_path):
    file = tmp_path / "cpu.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\nmixed_precision: 'no'\nuse_cpu: true\nnum_machines: 1\n"
        f"num_processes: 2\ndistributed_type: {distributed_type}\n"
    )
    assert below("--config_file", str(file), use_cpu=True) == TWO_BY_TORCHRUN
    assert below("--config_file", str(file), "--num_processes", "1", use_cpu=True) is None


def test_without_gpus_they_are_refused_and_not_trained_in_one(below):
    with pytest.raises(
        UserError, match=r"asked for 2 processes and has started one, .* training.use_cpu=true"
    ):
        below("--num_processes", "2", use_cpu=False)


def test_machines_that_know_nothing_of_each_other_are_refused(below):
    with pytest.raises(
        UserError, match=r"on 2 machines, and has started one without the others\. Add --multi_gpu"
    ):
        below("--num_machines", "2", "--num_processes", "2", "--machine_rank", "1", use_cpu=False)


def test_one_process_is_one(below, monkeypatch):
    assert below(use_cpu=False) is None
    assert below("--num_processes", "1", use_cpu=False) is None
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert below("--num_processes", "2", use_cpu=False) is None, "the launcher has started it as one of two"


def test_a_program_of_another_name_is_no_launcher(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "False")
    parent = types.SimpleNamespace(cmdline=lambda: ["bash", "run.sh", "--num_processes", "2"])
    monkeypatch.setattr(psutil, "Process", lambda: types.SimpleNamespace(parent=lambda: parent))
    started = []
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(words))
    start_requested_processes(use_cpu=False)
    assert started == []
