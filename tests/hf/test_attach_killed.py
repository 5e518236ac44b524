"""A trainer with a recipe that is killed, and goes on from its last checkpoint as if nothing had been."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
import torch
from fsdp2_on_gloo import launch
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


A_RANK = f"""
import os, signal, sys
sys.path[:0] = [{str(TESTS)!r}]
from sharded_trainers import assert_sharded, trainer_for
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

folder, phase, rank, case = sys.argv[1:]
last = get_last_checkpoint(folder)
begun = int(last.rpartition("-")[2]) if last else 0

def die(*_, **__):
    if os.environ["RANK"] == rank and (phase == "load" or trainer.state.global_step > begun):
        os.kill(os.getpid(), signal.SIGKILL)

def in_forward(layer, inputs, hidden):
    if hidden.requires_grad:
        die() if phase == "forward" else hidden.register_hook(die)

class Update(TrainerCallback):
    on_optimizer_step = die

fields = {{"save_strategy": "steps", "save_steps": 1, "max_steps": {2 * NUM_STEPS}}}
trainer, _ = trainer_for(folder, case, **fields)
if phase == "save":  # weights and state are written
    trainer._save_scaler = die
elif phase == "load":
    prepare = trainer.accelerator.prepare
    trainer.accelerator.prepare = lambda *objects, **options: die() or prepare(*objects, **options)
elif phase == "update":
    trainer.add_callback(Update())
elif phase != "never":
    layer = next(part for name, part in trainer.model.named_modules() if name.endswith("layers.0"))
    layer.register_forward_hook(in_forward)
trainer.train(resume_from_checkpoint=last)
assert_sharded(trainer)
"""


def sharded(
    forks, folder, phase="never", rank=0, world=2, case="optimizer.state=bf16 checkpointing.mode=full"
):
    """Train by FSDP2 until one rank is killed after a step; none ends the others."""
    folder.mkdir(exist_ok=True)
    ended = launch(forks, world, A_RANK, str(folder), phase, str(rank), case)
    if phase == "never":
        assert [one.returncode for one in ended] == [0] * world, ended[-1].stderr
        return
    killed = ended.pop(rank)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    for other in ended:
        assert other.returncode == 1
        last = other.stderr.strip().splitlines()[-1]
        assert "Another process has disappeared without a message: it was killed" in last
        assert "with trainer.train(resume_from_checkpoint=True)" in last


def logged_in(folder):
    last = folder / f"checkpoint-{2 * NUM_STEPS}"
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return [(record["step"], record["loss"], record["grad_norm"]) for record in history if "loss" in record]


def assert_goes_on(forks, folder, kills, **more):
    """Kill one rank after the other, each in what the one before has left, and compare with a run that was not."""
    sharded(forks, folder / "whole", **more)
    for phase, rank in kills:
        sharded(forks, folder / "killed", phase, rank, **more)
    sharded(forks, folder / "killed", **more)
    steps = logged_in(folder / "whole")
    assert [step for step, _, _ in steps] == list(range(1, 2 * NUM_STEPS + 1))
    assert logged_in(folder / "killed") == steps
    assert {path.suffix for path in (folder / "killed").iterdir()} == {""}, "what was cut short is gone"


def test_a_rank_that_is_killed_under_fsdp2_ends_the_others_with_a_line(forks, tmp_path):
    assert_goes_on(forks, tmp_path, [("backward", 1), ("save", 0)])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["checkpointing.mode=full", "lora"])
def test_ten_kills_of_ranks_under_fsdp2_are_gone_on_from_bit_for_bit(case, forks, tmp_path):
    draw = random.Random(case)
    phases = ["load", "forward", "backward", "update", "save"] * 2
    draw.shuffle(phases)
    assert_goes_on(forks, tmp_path, [(phase, draw.randrange(3)) for phase in phases], world=3, case=case)
