"""Processes that cannot train together say so, once, and all end with it."""

from __future__ import annotations

import shutil
import signal

import pytest
from tiny_models import TINY

from lowmem_ft.training.processes.rendezvous import RankInfo, _not_joined, differences

DIFFERENT_IN_PROCESS_1 = """
import os, sys
from lowmem_ft.cli.commands.train import main
what, folder = sys.argv.pop(1), sys.argv.pop(1)
os.chdir(folder)
if os.environ["RANK"] == "1":
    exec(what)
sys.exit(main())
"""


@pytest.fixture
def run_two(forks, tmp_path):
    """Two processes, each in a folder with data and a model of its own; the second does something else first."""

    def run(what, *settings):
        shared = (
            "training.use_cpu=true",
            "training.max_steps=1",
            "training.eval_steps=null",
            "budget.preflight=false",
        )
        folder = f"training.output_dir={tmp_path / 'run'}"
        return forks.run_two(
            DIFFERENT_IN_PROCESS_1, what, str(tmp_path), "recipe=tiny", *shared, folder, *settings
        )

    return run


def assert_both_end_with(processes, *said):
    everything = "".join(process.stderr for process in processes)
    assert [process.returncode for process in processes] == [2, 2], everything
    errors = [line for line in everything.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, everything
    assert all(words in errors[0] for words in said), errors[0]


def test_other_settings_are_named_with_the_process_that_has_them(run_two):
    processes = run_two("sys.argv.append('training.learning_rate=0.5')")
    assert_both_end_with(
        processes, "the same training.learning_rate, got 0.01 in process 0 (on", "and 0.5 in process 1 (on"
    )


def test_other_versions_are_named(run_two):
    patch = """
import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda name: "5.0.1" if name == "transformers" else version(name)
"""
    assert_both_end_with(run_two(patch), "the same version of transformers, got 5.", "and 5.0.1 in process 1")


def test_a_process_without_the_recipe_is_told_of_by_all(run_two):
    processes = run_two("sys.argv[1] = 'recipe=gone.yaml'")
    assert_both_end_with(processes, "gone.yaml", "(Reported by process 1 of 2, on ")


def test_a_process_without_the_model_is_told_of_by_all(run_two, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(TINY, tmp_path / "model")
    processes = run_two("os.chdir('elsewhere')", "model.name_or_path=./model")
    assert_both_end_with(processes, "./model", "(Reported by process 1 of 2, on ")


def test_weights_that_one_process_cannot_read_are_told_of_by_all(run_two):
    """They are read long after the processes have met."""
    damaged = """
from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.training.runtimes import values
def load_model(*args, **options):
    raise ModelError("model-00002.safetensors ends early.")
values.load_model = load_model
"""
    assert_both_end_with(run_two(damaged), "ends early. (Reported by process 1 of 2, on ")


def test_other_data_are_named(run_two, tmp_path):
    rows = (TINY / "data.jsonl").read_text().splitlines(keepends=True)
    for name, kept in (("one", rows), ("two", rows[:-2])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.jsonl").write_text("".join(kept))
    link = tmp_path / "data.jsonl"
    link.symlink_to(tmp_path / "one" / "data.jsonl")
    read_other = f"""
from lowmem_ft.training.runtimes import reading_data as start
load = start.load_data
import dataclasses
start.load_data = lambda config, *args, **options: load(
    dataclasses.replace(config, path={str(tmp_path / "two" / "data.jsonl")!r}), *args, **options
)
"""
    processes = run_two(read_other, f"data.path={link}")
    everything = "".join(process.stderr for process in processes)
    assert [process.returncode for process in processes] == [2, 2], everything
    assert (
        everything.count("Every process needs the same number of training examples, got 56 in process 0") == 1
    )
    assert "54 in process 1" in everything


def test_a_checkpoint_that_only_one_machine_has_is_named(run_two):
    only_there = """
from lowmem_ft.training.folder.run_folder import RunFolder
opened = RunFolder.open
def with_checkpoint(recipe):
    folder = opened(recipe)
    folder.resume_from = folder.path / "checkpoint-7"
    return folder
RunFolder.open = staticmethod(with_checkpoint)
"""
    processes = run_two(only_there)
    assert_both_end_with(
        processes, "the checkpoint to resume from, got none in process 0", "checkpoint-7 in process 1"
    )


def test_a_process_that_does_not_come_is_named(forks, tmp_path):
    source = """
import os, sys
from datetime import timedelta
from lowmem_ft.cli.commands.train import main
from lowmem_ft.training.processes import rendezvous
rendezvous.PATIENCE = timedelta(seconds=1)
if os.environ["RANK"] == "1":
    os._exit(9)
sys.exit(main())
"""
    first, _ = forks.run_two(
        source, "recipe=tiny", "training.use_cpu=true", f"training.output_dir={tmp_path}/run"
    )
    assert first.returncode == 2
    assert "error: All processes meet at MASTER_ADDR=127.0.0.1" in first.stderr
    assert "1/2 clients joined" in first.stderr
    assert "Traceback" not in first.stderr


@pytest.mark.parametrize("waits_for", ["a process that does not come", "a group"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_process_that_waits_for_others_in_torch(number, waits_for, forks, tmp_path):
    """A launcher that has lost one of them would otherwise end this one by SIGKILL, half a minute later."""
    source = f"""
import os, sys, threading
import torch.distributed
from lowmem_ft.cli.commands.train import main
from lowmem_ft.training.runtimes import process_group
from lowmem_ft.training.processes import rendezvous
def send_signal():
    os.kill(os.getpid(), {number:d})
def waits_in_cpp(*args, **options):
    threading.Timer(0.2, send_signal).start()
    store.wait(["never written"])
def when_it_waits():
    while not rendezvous._meetings:
        pass
    store.wait([rendezvous._key("digest", 0)])
    send_signal()
if sys.argv.pop(1) == "a group":
    process_group.rendezvous = lambda *args, **options: None
    process_group.launched_runtime = waits_in_cpp
else:
    threading.Thread(target=when_it_waits, daemon=True).start()
store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
place = {{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}}
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", **place)
sys.exit(main())
"""
    settings = ("recipe=tiny", "training.use_cpu=true", f"training.output_dir={tmp_path}/run")
    ended = forks.run(source, waits_for, *settings)
    assert ended.returncode == 128 + number
    assert ended.stderr.splitlines()[-1] == (
        f"Stopped by {number.name} before the first step: nothing was trained, and nothing was written."
    )
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_explained(forks, tmp_path):
    source = """
import os, socket, sys
from datetime import timedelta
from lowmem_ft.cli.commands.train import main
from lowmem_ft.training.processes import rendezvous
rendezvous.PATIENCE = timedelta(seconds=1)
if os.environ["RANK"] == "0":
    other = socket.socket(socket.AF_INET6)
    other.bind(("::", int(os.environ["MASTER_PORT"])))
    other.listen()
else:
    os._exit(0)
sys.exit(main())
"""
    first, _ = forks.run_two(
        source, "recipe=tiny", "training.use_cpu=true", f"training.output_dir={tmp_path}/run"
    )
    assert first.returncode == 2
    assert (
        "is in use, for example by another run. Name another: `accelerate launch --main_process_port"
        in first.stderr
    )
    assert "Traceback" not in first.stderr


def test_different_recipes_altogether_are_not_listed_to_the_last_key():
    arrivals = [RankInfo("a", (), {f"key {i}": value for i in range(20)}) for value in ("x", "y", "y")]
    problems = list(differences(arrivals))
    assert len(problems) == 9
    assert "got x in process 0 (on a) and y in process 1 (on a) and 1 more" in problems[0]
    assert problems[-1].startswith("12 more settings differ")


@pytest.mark.parametrize(
    "message,way_out",
    [
        ("The server socket has failed to listen. code: -98, name: EADDRINUSE", "--main_process_port 29501"),
        ("The client socket has timed out after 600000ms", "its firewall allows the port"),
        ("Connection reset by peer", "NCCL_SOCKET_IFNAME"),
    ],
)
def test_what_torch_says_of_a_failed_meeting_is_explained(message, way_out):
    said = _not_joined(message, {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert way_out in said
    assert "MASTER_ADDR=10.0.0.1, MASTER_PORT=29500" in said
    assert said.endswith(f"torch says: {message}")
