"""A trainer with a recipe in two processes that train together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from attached_trainers import attached_trainer
from roundings import LOSS

TESTS = Path(__file__).parents[1]

TWO = f"""
import json, os, sys
sys.path.insert(0, {str(TESTS)!r})
import torch
from attached_trainers import attached_trainer

folder, precision, *settings = sys.argv[1:]
dtype = getattr(torch, precision)
trainer, meter, _ = attached_trainer(
    folder,
    *settings,
    dtype=dtype,
    fields={{
        "per_device_train_batch_size": 2, "ddp_backend": "gloo", "save_strategy": "steps", "save_steps": 4
    }},
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
    # Sums of gradients in another order; bfloat16 weights are rounded to 8 bits by what comes of it. Norms of gradients
    # move more with the weights than losses do.
    tolerance = LOSS if precision == "float32" else 2.0**-8
    assert report["losses"] == pytest.approx(meter.losses, rel=tolerance)
    assert report["norms"] == pytest.approx(meter.norms, rel=10 * tolerance)
    [checkpoint] = (tmp_path / "two").iterdir()
    assert checkpoint.name == "checkpoint-4"
    assert {path.name for path in checkpoint.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
