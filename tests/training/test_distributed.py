"""Two processes do what one does at the same global batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import TRAIN
from roundings import SMOOTH_ADAMW, of_updates
from safetensors.torch import load_file

from lowmem_ft.training.run.loop import train

SCRIPT = Path(__file__).parents[2] / "scripts" / "finetune.py"
MODULE = ("-m", "lowmem_ft", "train")


SHARED = ("training.max_steps=14", "training.eval_steps=7", SMOOTH_ADAMW)
"""Two epochs of 7, and with packing windows that do not divide evenly."""


def launch_two(*program):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--cpu", *program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def settings_of_two(folder, *options):
    one_each = "training.gradient_accumulation_steps=1"
    return (
        "recipe=tiny",
        "training.use_cpu=true",
        "budget.preflight=false",  # the wheel's slow test has one beside two processes
        *SHARED,
        *options,
        one_each,
        f"training.output_dir={folder}",
    )


def train_one(tiny, folder, *options):
    train(tiny(*SHARED, *options, "training.gradient_accumulation_steps=2", output_dir=folder))


def assert_same_run(one, two, metrics):
    # Gradients of the two halves are added in fp32 either way; all-reduce may add them in the other order.
    assert metrics(two) == pytest.approx(metrics(one), rel=1e-5)
    assert metrics(two, "tokens") == metrics(one, "tokens")
    first, second = load_file(one / "model/model.safetensors"), load_file(two / "model/model.safetensors")
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight, rtol=0, atol=of_updates(14, 0.01))


@pytest.mark.slow
@pytest.mark.parametrize("program", [(str(SCRIPT),), MODULE], ids=["script", "module"])
def test_two_launched_processes_equal_one(tiny, metrics, tmp_path, program):
    """Without the launcher, whose imports take most of the time, the next test shows the same."""
    one, two = tmp_path / "one", tmp_path / "two"
    train_one(tiny, one)
    launched = launch_two(*program, *settings_of_two(two))
    assert launched.returncode == 0, launched.stderr
    assert "2 processes" in launched.stderr
    assert_same_run(one, two, metrics)


def test_two_processes_equal_one(tiny, metrics, forks, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    train_one(tiny, one)
    processes = forks.run_two(TRAIN, *settings_of_two(two))
    assert [process.returncode for process in processes] == [0, 0], said(processes)
    assert "2 processes" in said(processes)
    assert_same_run(one, two, metrics)


def test_two_processes_that_pack_equal_one(tiny, metrics, forks, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    packing = ("data.packing=true", "data.max_length=64")
    train_one(tiny, one, *packing)
    for process in forks.run_two(TRAIN, *settings_of_two(two, *packing)):
        assert process.returncode == 0, process.stderr
    assert_same_run(one, two, metrics)


def test_a_users_error_is_said_once_by_two_processes(forks, tmp_path):
    template = tmp_path / "broken.jinja"
    template.write_text("{% for message in messages %}")
    processes = forks.run_two(TRAIN, *settings_of_two(tmp_path / "run", f"data.chat_template={template}"))
    assert [process.returncode for process in processes] == [2, 2]
    assert said(processes).count("is not valid Jinja") == 1


def test_what_two_processes_know_before_they_meet_is_said_once_too(forks, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"messages": 1}\n' * 2)
    processes = forks.run_two(TRAIN, *settings_of_two(tmp_path / "run", f"data={tmp_path / 'data.jsonl'}"))
    assert [process.returncode for process in processes] == [2, 2]
    assert said(processes).count("error: Example 0 of") == 1


def said(processes):
    return "".join(process.stderr for process in processes)


BREAK_RANK_1 = """
import os, signal, sys
from lowmem_ft.cli.commands.train import main
from lowmem_ft.data.batches.stream import DataStream
from lowmem_ft.foundation.errors import DataError
from lowmem_ft.training.folder import run_files

what, rank = sys.argv.pop(1), os.environ["RANK"]
next_window, count = DataStream.next_window, 0

def third_window(self):
    global count
    count += 1
    if count == 3 and rank == "1":
        if what == "signal":
            os.kill(os.getpid(), signal.SIGUSR1)
        elif what == "data":
            raise DataError("row 17 cannot be read.")
    return next_window(self)

def full_disk(*args):
    raise OSError(28, "No space left on device")

DataStream.next_window = third_window
if what == "disk":
    assert run_files.save_model
    run_files.save_model = full_disk
sys.exit(main())
"""


def run_two_with(forks, what, tmp_path, *arguments):
    """Two processes, of which the second meets with something at its third step."""
    shared = (
        "recipe=tiny",
        "training.use_cpu=true",
        "training.eval_steps=null",
        "budget.preflight=false",
        *arguments,
    )
    return forks.run_two(BREAK_RANK_1, what, *shared, f"training.output_dir={tmp_path / 'run'}")


def test_a_signal_to_one_process_stops_both_with_a_checkpoint(forks, tmp_path):
    processes = run_two_with(forks, "signal", tmp_path, "training.save_steps=null")
    assert [process.returncode for process in processes] == [138, 138], said(processes)
    assert (tmp_path / "run" / "checkpoint-3" / "random-state-1.json").exists()


def test_an_error_of_another_process_is_said_and_ends_both(forks, tmp_path):
    processes = run_two_with(forks, "data", tmp_path)
    assert [process.returncode for process in processes] == [1, 2], said(processes)
    assert said(processes).count("error: row 17 cannot be read.") == 1


def test_a_checkpoint_that_cannot_be_written_ends_both_with_one_message(forks, tmp_path):
    processes = run_two_with(forks, "disk", tmp_path, "training.save_steps=2")
    assert [process.returncode for process in processes] == [2, 2], said(processes)
    assert said(processes).count("checkpoint-2 cannot be written: [Errno 28]") == 1
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left - {".lock"} == {"metrics.jsonl", "recipe.yaml"}
