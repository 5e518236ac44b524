"""At every rung of the ladder, a run that was killed goes on from its last checkpoint bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from ladder_rungs import RUNGS, settings_of
from safetensors.torch import load_file

from lowmem_ft.training.run.loop import train

KILLED_AT = 6
SHORT = (
    "training.max_steps=9",
    "training.save_steps=4",
    "training.eval_steps=4",
    "training.learning_rate=1e-3",
    "data.max_length=64",
)

KILL_ITSELF = f"""
import os, signal, sys
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.run.loop import train
from lowmem_ft.training.folder.run_folder import RunFolder

write = RunFolder.write_metrics

def write_and_die(self, record):
    write(self, record)
    if record["step"] == {KILLED_AT} and "loss" in record:
        os.kill(os.getpid(), signal.SIGKILL)

RunFolder.write_metrics = write_and_die
train(load_recipe("tiny", sys.argv[1:]))
"""


def overrides_of(rung, folder: Path) -> list[str]:
    tiling = [setting for setting in settings_of(rung) if not setting.startswith("tiling")]
    if tiling != list(settings_of(rung)):
        tiling += ["tiling.mlp=2", "tiling.head=3"]
    return [*tiling, *SHORT, "training.use_cpu=true", f"training.output_dir={folder}"]


DIFFER_MOST = ("+ checkpointing, chunked loss", "+ MLP and head in tiles")
"""Those that `make test` tries: plain state, and all that the ladder has, compact, on the host or in tiles."""


@pytest.mark.parametrize(
    "rung",
    [
        pytest.param(rung, id=rung.name, marks=[] if rung.name in DIFFER_MOST else pytest.mark.slow)
        for rung in RUNGS
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(rung, forks, tiny, metrics, tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    done = forks.run(KILL_ITSELF, *overrides_of(rung, folder))
    assert done.returncode == -signal.SIGKILL, done.stderr
    train(tiny(*overrides_of(rung, whole), output_dir=whole))
    assert not (folder / "model").exists()
    assert (folder / "checkpoint-4" / "checkpoint.json").exists()
    train(tiny(*overrides_of(rung, folder), "training.resume_from_checkpoint=auto", output_dir=folder))
    for key in ("loss", "grad_norm"):
        assert metrics(folder, key) == metrics(whole, key)
    one, other = (load_file(run / "model" / "model.safetensors") for run in (whole, folder))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
