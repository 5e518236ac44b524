"""A trainer with a recipe in processes of its own: one that is killed, and two that train together."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from attached_trainers import attached_trainer, weights_of

TESTS = Path(__file__).parents[1]

LADDER = (
    "accumulation.order=vertical",
    "checkpointing.mode=full",
    "training.per_device_train_batch_size=4",
    "offload.optimizer=host",
    "offload.parameters=stream",
    "optimizer.in_backward=true",
    "optimizer.state=8bit",
)
SAVED = {"save_strategy": "steps", "save_steps": 2}

KILLED = f"""
import os, signal, sys
sys.path.insert(0, {str(TESTS)!r})
from attached_trainers import attached_trainer
from transformers import TrainerCallback

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

trainer, _, _ = attached_trainer(sys.argv[1], *sys.argv[2:], fields={SAVED!r})
trainer.add_callback(Kill())
trainer.train()
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(forks, tmp_path):
    """From its last checkpoint, a step before the kill, at the lowest rung."""
    done = forks.run(KILLED, str(tmp_path / "killed"), *LADDER)
    assert done.returncode == -signal.SIGKILL, done.stderr
    ends = []
    for name, how in (("whole", {}), ("killed", {"resume_from_checkpoint": True})):
        trainer, meter, handle = attached_trainer(tmp_path / name, *LADDER, fields=SAVED)
        trainer.train(**how)
        handle.remove()
        ends.append((meter.losses[-2:], weights_of(trainer.model)))
    (losses, weights), (losses_again, again) = ends
    assert losses == losses_again
    assert all(torch.equal(weights[name], again[name]) for name in weights)


TWO = f"""
import json, os, sys
sys.path.insert(0, {str(TESTS)!r})
import torch
from attached_trainers import attached_trainer

folder, precision, *settings = sys.argv[1:]
dtype = getattr(torch, precision)
trainer, meter, _ = attached_trainer(
    folder, *settings, dtype=dtype, fields={{"per_device_train_batch_size": 2, "ddp_backend": "gloo"}}
)
trainer.train()
if trainer.is_world_process_zero():
    by_ddp = trainer.model_wrapped is not trainer.model
    print(json.dumps({{"losses": meter.losses, "norms": meter.norms, "ddp": by_ddp}}))
"""


@pytest.mark.parametrize("precision, by_ddp", [("float32", True), ("bfloat16", False)])
def test_two_processes_train_what_one_does(precision, by_ddp, forks, tmp_path):
    """By DDP, and without it where 16-bit gradients are summed in float32, which DDP does not take."""
    settings = ["checkpointing.mode=full", "loss.chunk_tokens=32"]
    if precision == "bfloat16":
        settings.append("optimizer.master=split16")
    one, meter, _ = attached_trainer(tmp_path / "one", *settings, dtype=getattr(torch, precision))
    one.train()
    done = forks.run_two(TWO, str(tmp_path / "two"), precision, *settings)
    assert [process.returncode for process in done] == [0, 0], done[0].stderr + done[1].stderr
    (report,) = [json.loads(line) for line in done[0].stdout.splitlines() if line.startswith("{")]
    assert report["ddp"] == by_ddp
    # Sums of gradients in another order; bfloat16 weights are rounded to 8 bits by what comes of it.
    tolerance = 2e-6 if precision == "float32" else 2e-3
    assert report["losses"] == pytest.approx(meter.losses, abs=tolerance)
    assert report["norms"] == pytest.approx(meter.norms, rel=10 * tolerance)
