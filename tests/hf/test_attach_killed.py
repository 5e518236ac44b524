"""A trainer with a recipe that is killed, and goes on from its last checkpoint as if nothing had been."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
import torch
from ladder_rungs import RUNGS, settings_of
from safetensors.torch import load_file
from transformers.trainer_utils import get_last_checkpoint

TESTS = Path(__file__).parents[1]
NUM_STEPS = 4

PROGRAM = f"""
import os, signal, sys, time
sys.path[:0] = [{str(TESTS)!r}]
import torch
from attached_trainers import attached_trainer
from transformers.trainer_utils import get_last_checkpoint

folder, moment, dtype, *settings = sys.argv[1:]

def die(*_, **__):
    if trainer.state.global_step >= 2:
        os.kill(os.getpid(), signal.SIGKILL)

fields = {{"save_strategy": "steps", "save_steps": 1, "max_steps": {NUM_STEPS}, "bf16": dtype == "float32"}}
trainer, _, _ = attached_trainer(folder, *settings, dtype=getattr(torch, dtype), fields=fields)
if moment == "a save":  # weights and state are written
    trainer._save_scaler = die
elif moment == "backward":
    def when_it_comes_back(layer, inputs, hidden):
        if hidden.requires_grad:
            hidden.register_hook(die)

    trainer.model.model.layers[0].register_forward_hook(when_it_comes_back)
elif moment != "never":
    killed, killer = os.getpid(), os.fork()
    if killer == 0:
        time.sleep(float(moment))
        os.kill(killed, signal.SIGKILL)
        os._exit(0)
begin = time.monotonic()
trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) is not None)
print(time.monotonic() - begin)
if moment not in ("never", "a save", "backward"):
    os.kill(killer, signal.SIGKILL)
"""


def trained(forks, folder, moment, rung):
    """Go on until a moment after two steps, or for a number of seconds; what became of the process."""
    settings = [one for one in settings_of(rung) if not one.startswith(("tiling", "model.dtype", "training"))]
    if "tiling.mlp=8" in settings_of(rung):
        settings += ["tiling.mlp=2", "tiling.head=3"]
    if "accumulation.order=vertical" in settings:
        settings.append("training.per_device_train_batch_size=4")
    dtype = "bfloat16" if "model.dtype=bfloat16" in settings_of(rung) else "float32"
    folder.mkdir(exist_ok=True)
    return forks.run(PROGRAM, str(folder), str(moment), dtype, *settings)


def end_of(folder):
    """Losses and norms of all steps, weights, and the optimizer's state."""
    last = folder / f"checkpoint-{NUM_STEPS}"
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    optimizer = torch.load(last / "optimizer.pt", weights_only=True)["state"]
    tensors = {
        f"{number}.{name}": value for number, state in optimizer.items() for name, value in state.items()
    }
    logged = [(record["step"], record["loss"], record["grad_norm"]) for record in history if "loss" in record]
    return logged, {**load_file(last / "model.safetensors"), **tensors}


def same_end(one, other):
    (logged, tensors), (logged_again, again) = end_of(one), end_of(other)
    assert [step for step, _, _ in logged] == list(range(1, NUM_STEPS + 1))
    assert logged == logged_again
    assert tensors.keys() == again.keys()
    for name, value in tensors.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(again[name])), name


def files_of(checkpoint):
    return {path.name for path in Path(checkpoint).iterdir()}


def go_on_to_the_end(forks, folder, whole, rung, moments):
    """Kill at each of the moments, then no more; how often it was killed."""
    kills = 0
    for moment in moments:
        done = trained(forks, folder, moment, rung)
        kills += done.returncode == -signal.SIGKILL
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        if last := get_last_checkpoint(str(folder)):
            assert files_of(last) == files_of(whole / f"checkpoint-{NUM_STEPS}")
    done = trained(forks, folder, "never", rung)
    assert done.returncode == 0, done.stderr
    assert {path.suffix for path in folder.iterdir()} == {""}, "what was cut short is gone"
    same_end(whole, folder)
    return kills


def test_a_run_killed_in_backward_and_in_a_save_goes_on_bit_for_bit(forks, tmp_path):
    """Weights are updated in backward there, so that some are a step ahead of others."""
    whole, rung = tmp_path / "whole", RUNGS[-1]
    assert trained(forks, whole, "never", rung).returncode == 0
    assert go_on_to_the_end(forks, tmp_path / "killed", whole, rung, ["a save", "backward"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_every_rung_killed_at_any_moment_goes_on_bit_for_bit(rung, forks, tmp_path):
    whole = tmp_path / "whole"
    done = trained(forks, whole, "never", rung)
    assert done.returncode == 0, done.stderr
    seconds, draw = float(done.stdout.split()[-1]), random.Random(RUNGS.index(rung))
    moments = ["a save", "backward", *(draw.uniform(0, seconds / 2) for _ in range(6))]
    # Twice for certain; whether it still ran at the other moments depends on what else the machine does.
    assert go_on_to_the_end(forks, tmp_path / "killed", whole, rung, moments) >= 2
