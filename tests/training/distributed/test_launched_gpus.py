"""Each process of a launch has a GPU for itself, or all end with a sentence: by a CUDA that answers questions alone."""

from __future__ import annotations

import types

import pytest
import torch

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.training.processes import launched_gpus
from lowmem_ft.training.processes.launch import Launch
from lowmem_ft.training.processes.launched_gpus import expected_gpu, own_gpu
from lowmem_ft.training.processes.rendezvous import RankInfo, _shared_gpus

TWO = Launch(num_processes=2)

TRAIN = """
import os, sys, types, torch
from lowmem_ft.cli.commands.train import main
gpus = {"0": sys.argv.pop(1), "1": sys.argv.pop(1)}[os.environ["RANK"]].split()
torch.cuda.is_available = lambda: bool(gpus)
torch.cuda.device_count = lambda: len(gpus)
torch.cuda.get_device_properties = lambda index: types.SimpleNamespace(name="NVIDIA L4", uuid=gpus[index])
sys.exit(main())
"""


def said_by_two(forks, tmp_path, first, second):
    """What two processes end with that see these GPUs: one line, once."""
    folder = f"training.output_dir={tmp_path / 'run'}"
    processes = forks.run_two(TRAIN, first, second, "recipe=tiny", "budget.preflight=false", folder)
    everything = "".join(process.stderr for process in processes)
    assert [process.returncode for process in processes] == [2, 2], everything
    [error] = [line for line in everything.splitlines() if line.startswith("error: ")]
    return error


def test_two_processes_without_a_gpu_name_it_and_the_way_out(forks, tmp_path):
    error = said_by_two(forks, tmp_path, "", "")
    assert "Each of the 2 processes on this machine needs a GPU of its own, and torch sees none" in error
    assert "Set training.use_cpu=true" in error


def test_a_process_that_misses_its_gpu_is_named_by_all(forks, tmp_path):
    error = said_by_two(forks, tmp_path, "GPU-a", "")
    assert "and torch sees none" in error
    assert "(Reported by process 1 of 2, on " in error


def test_more_processes_than_gpus(forks, tmp_path):
    error = said_by_two(forks, tmp_path, "GPU-a", "GPU-a")
    assert "got processes 0 and 1 of 2 on the same one (NVIDIA L4, UUID GPU-a, on " in error
    assert (
        "Start at most 1 there, the number of GPUs that they see: `accelerate launch --num_processes 1`"
    ) in error


def test_gpus_are_told_apart_on_each_machine():
    seen = [("one", "A"), ("one", "B"), ("one", "A"), ("two", "C"), ("two", "D")]
    [problem] = _shared_gpus([RankInfo(host, gpu=gpu) for host, gpu in seen])
    assert "processes 0 and 2 of 5 on the same one (A, on one). Start at most 2 there" in problem
    assert list(_shared_gpus([RankInfo("one")] * 3)) == []


@pytest.fixture
def cuda_of(monkeypatch):
    """This process sees these GPUs of a torch that is built for them."""

    def see(*uuids):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(uuids))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda index: types.SimpleNamespace(name="NVIDIA L4", uuid=uuids[index]),
        )

    return see


def test_a_scheduler_may_show_each_process_its_own_gpu_alone(cuda_of):
    """Slurm's `--gpus-per-task=1`: the fourth process of a machine sees one GPU, which is number 0 there."""
    cuda_of("A")
    assert own_gpu(TWO, use_cpu=False, environment={"LOCAL_RANK": "3"}) == "NVIDIA L4, UUID A"
    cuda_of("A", "B")
    assert own_gpu(TWO, use_cpu=False, environment={"LOCAL_RANK": "1"}) == "NVIDIA L4, UUID B"


def test_a_process_runs_near_the_gpu_that_it_trains_on(cuda_of, monkeypatch, caplog):
    cuda_of("A", "B")
    devices = [
        types.SimpleNamespace(name="NVIDIA L4", pci_domain_id=1, pci_bus_id=bus, pci_device_id=0)
        for bus in (7, 193)
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", devices.__getitem__)
    monkeypatch.setattr(launched_gpus, "run_near", {"0001:c1:00.0": frozenset({2, 3})}.__getitem__)
    with caplog.at_level("INFO"):
        launched_gpus.run_near_own_gpu({"LOCAL_RANK": "1"})
    assert "runs on the 2 cores of the NUMA node of its GPU (NVIDIA L4, 0001:c1:00.0)" in caplog.text


def test_processes_on_the_cpu_need_none(cuda_of):
    cuda_of()
    assert own_gpu(TWO, use_cpu=True) == ""
    assert own_gpu(TWO, use_cpu=False, environment={"ACCELERATE_USE_CPU": "True"}) == ""


@pytest.mark.parametrize("value", ["", "-1", "9"])
def test_the_variable_that_hides_gpus_is_named(value, cuda_of):
    cuda_of()
    environment = {"CUDA_VISIBLE_DEVICES": value}
    with pytest.raises(
        UserError, match=f"torch sees none: CUDA_VISIBLE_DEVICES='{value}'. Set training.use_cpu"
    ):
        own_gpu(TWO, use_cpu=False, environment=environment)
    assert expected_gpu(environment) == f"CUDA_VISIBLE_DEVICES='{value}'"


def test_one_process_that_does_not_find_the_gpu_it_was_meant_for_says_so(forks, tmp_path):
    hidden = "import os, sys; os.environ['CUDA_VISIBLE_DEVICES'] = ''\n" + TRAIN.partition("gpus =")[0]
    settings = ("recipe=tiny", "training.max_steps=1", "training.eval_steps=null", "budget.preflight=false")
    done = forks.run(f"{hidden}sys.exit(main())", *settings, f"training.output_dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    assert "Training on the processor, because torch sees no GPU: " in done.stderr


def test_a_machine_without_a_gpu_is_no_surprise(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr(
        "lowmem_ft.training.processes.launched_gpus._DRIVER", types.SimpleNamespace(exists=lambda: False)
    )
    assert expected_gpu({}) is None
    monkeypatch.setattr(
        "lowmem_ft.training.processes.launched_gpus._DRIVER", types.SimpleNamespace(exists=lambda: True)
    )
    assert expected_gpu({}) == f"torch {torch.__version__} is built without CUDA"
