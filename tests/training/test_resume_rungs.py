"""At every rung of the ladder, a run that was killed goes on from its last checkpoint bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ladder_rungs import RUNGS, settings_of
from safetensors.torch import load_file

from lowmem_ft.training import train

KILLED_AT = 6
SHORT = (
    "training.max_steps=9",
    "training.save_steps=4",
    "training.eval_steps=4",
    "training.learning_rate=1e-3",
    "data.max_length=64",
)

# One process for all rungs, since importing takes longest; each run is a fork of it, and kills itself.
KILL_EACH = f"""
import os, signal, sys
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training import train
from lowmem_ft.training.run_folder import RunFolder

write = RunFolder.write_metrics

def write_and_die(self, record):
    write(self, record)
    if record["step"] == {KILLED_AT} and "loss" in record:
        os.kill(os.getpid(), signal.SIGKILL)

RunFolder.write_metrics = write_and_die
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        train(load_recipe("tiny", line.split()))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    print(os.WTERMSIG(status) if os.WIFSIGNALED(status) else "ended by itself", flush=True)
"""


def overrides_of(rung, folder: Path) -> list[str]:
    tiling = [setting for setting in settings_of(rung) if not setting.startswith("tiling")]
    if tiling != list(settings_of(rung)):
        tiling += ["tiling.mlp=2", "tiling.head=3"]
    return [*tiling, *SHORT, "training.use_cpu=true", f"training.output_dir={folder}"]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """For each rung the folder of a run that was killed."""
    folder = tmp_path_factory.mktemp("killed")
    folders = {rung.name: folder / str(index) for index, rung in enumerate(RUNGS)}
    lines = [" ".join(overrides_of(rung, folders[rung.name])) for rung in RUNGS]
    result = subprocess.run(
        [sys.executable, "-c", KILL_EACH],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.stdout.split("\n")[:-1] == [str(int(signal.SIGKILL))] * len(RUNGS), result.stderr[-2000:]
    return folders


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_a_killed_run_goes_on_bit_for_bit(rung, killed, tiny, metrics, tmp_path):
    whole, folder = tmp_path / "whole", killed[rung.name]
    train(tiny(*overrides_of(rung, whole), output_dir=whole))
    assert not (folder / "model").exists()
    assert (folder / "checkpoint-4" / "checkpoint.json").exists()
    train(tiny(*overrides_of(rung, folder), "training.resume_from_checkpoint=auto", output_dir=folder))
    for key in ("loss", "grad_norm"):
        assert metrics(folder, key) == metrics(whole, key)
    one, other = (load_file(run / "model" / "model.safetensors") for run in (whole, folder))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
