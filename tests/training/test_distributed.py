"""Two processes do what one does at the same global batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lowmem_ft.training import train

SCRIPT = Path(__file__).parents[2] / "scripts" / "finetune.py"
MODULE = ("-m", "lowmem_ft", "train")


def launch_two(*arguments, program=(str(SCRIPT),)):
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--num_processes",
        "2",
        "--cpu",
        *program,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [*command, "recipe=tiny", *arguments], capture_output=True, text=True, env=environment
    )


@pytest.mark.parametrize(
    "options,program",
    [((), (str(SCRIPT),)), (("data.packing=true", "data.max_length=64"), MODULE)],
    ids=["padded, by the script", "packed, by the module"],
)
def test_two_processes_equal_one(tiny, metrics, tmp_path, options, program):
    one, two = tmp_path / "one", tmp_path / "two"
    # 14 steps: two epochs of 7, and with packing windows that do not divide evenly
    shared = ("training.max_steps=14", "training.eval_steps=7", *options)
    train(tiny(*shared, "training.gradient_accumulation_steps=2", output_dir=one))
    launched = launch_two(
        *shared,
        "training.gradient_accumulation_steps=1",
        f"training.output_dir={two}",
        program=program,
    )
    assert launched.returncode == 0, launched.stderr
    assert "2 process(es)" in launched.stderr
    # Gradients of the two halves are added in fp32 either way; all-reduce may add them in the other order.
    assert metrics(two) == pytest.approx(metrics(one), rel=1e-5)
    assert metrics(two, "tokens") == metrics(one, "tokens")
    first, second = load_file(one / "model/model.safetensors"), load_file(two / "model/model.safetensors")
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight, rtol=1e-4, atol=1e-5)


def test_a_users_error_is_said_once_by_two_processes(tmp_path):
    launched = launch_two("data.max_length=100000", f"training.output_dir={tmp_path}")
    assert launched.returncode != 0
    assert launched.stderr.count("error: data.max_length") == 1


BREAK_RANK_1 = """
import os, signal, sys
from lowmem_ft.cli.train import main
from lowmem_ft.data import DataStream
from lowmem_ft.errors import DataError
from lowmem_ft.training import session

what, rank = sys.argv.pop(1), os.environ["RANK"]
next_window, count = DataStream.next_window, 0

def third_window(self):
    global count
    count += 1
    if count == 3 and rank == "1":
        if what == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif what == "data":
            raise DataError("row 17 cannot be read.")
    return next_window(self)

def full_disk(*args):
    raise OSError(28, "No space left on device")

DataStream.next_window = third_window
if what == "disk":
    session.save_model = full_disk
sys.exit(main())
"""


def run_two_with(what, tmp_path, *arguments):
    """Two processes by torchrun, of which the second meets with something at its third step."""
    script = tmp_path / "break_rank_1.py"
    script.write_text(BREAK_RANK_1)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    shared = ["recipe=tiny", "training.use_cpu=true", "training.eval_steps=null", *arguments]
    return subprocess.run(
        [sys.executable, *launcher, str(script), what, *shared, f"training.output_dir={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        timeout=600,
    )


def test_a_signal_to_one_process_stops_both_with_a_checkpoint(tmp_path):
    launched = run_two_with("signal", tmp_path, "training.save_steps=null")
    assert launched.returncode != 0
    assert "exitcode  : 143" in launched.stderr
    assert "AssertionError" not in launched.stderr
    assert (tmp_path / "run" / "checkpoint-3" / "random-state-1.json").exists()


def test_an_error_of_another_process_is_said_and_ends_both(tmp_path):
    launched = run_two_with("data", tmp_path)
    assert launched.returncode != 0
    assert launched.stderr.count("error: row 17 cannot be read.") == 1


def test_a_checkpoint_that_cannot_be_written_ends_both_with_one_message(tmp_path):
    launched = run_two_with("disk", tmp_path, "training.save_steps=2")
    assert launched.returncode != 0
    assert launched.stderr.count("checkpoint-2 cannot be written: [Errno 28]") == 1
    assert "exitcode  : 2" in launched.stderr  # the launcher may end the other before it has ended itself
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left - {".lock"} == {
        "metrics.jsonl",
        "recipe.yaml",
    }  # that of a process that was ended locks nothing
