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


def launch_two(*arguments):
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--num_processes",
        "2",
        "--cpu",
        str(SCRIPT),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [*command, "recipe=tiny", *arguments], capture_output=True, text=True, env=environment
    )


@pytest.mark.parametrize(
    "options", [(), ("data.packing=true", "data.max_length=64")], ids=["padded", "packed"]
)
def test_two_processes_equal_one(tiny, metrics, tmp_path, options):
    one, two = tmp_path / "one", tmp_path / "two"
    # 14 steps: two epochs of 7, and with packing windows that do not divide evenly
    shared = ("training.max_steps=14", "training.eval_steps=7", *options)
    train(tiny(*shared, "training.gradient_accumulation_steps=2", output_dir=one))
    launched = launch_two(*shared, "training.gradient_accumulation_steps=1", f"training.output_dir={two}")
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
