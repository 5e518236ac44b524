"""A run whose state waits on the host is the run whose state does not."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from lowmem_ft.foundation.errors import DoesNotFitError
from lowmem_ft.foundation.host import pinned_memory
from lowmem_ft.foundation.system.host_limits import HostLimit
from lowmem_ft.training.run.loop import train

SHORT = (
    "training.max_steps=4",
    "training.save_steps=2",
    "training.eval_steps=2",
    "training.lr_scheduler_type=constant",  # a schedule depends on the number of steps
    "training.warmup_steps=0",
)
COMPACT = ("model.dtype=bfloat16", "optimizer.state=8bit", "optimizer.master=split24")
HOST = "offload.optimizer=host"


def files_of(folder):
    """Weights and optimizer state of a checkpoint or a model."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    assert tensors
    return tensors


def assert_same(one, other):
    first, second = files_of(one), files_of(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("formats", [(), COMPACT], ids=["float32", "compact"])
def test_checkpoints_and_models_are_those_of_the_device(tiny, metrics, tmp_path, formats):
    device, host = tmp_path / "device", tmp_path / "host"
    train(tiny(*SHORT, *formats, output_dir=device))
    train(tiny(*SHORT, *formats, HOST, output_dir=host))
    assert metrics(device) == metrics(host)
    for folder in ("checkpoint-2", "checkpoint-4", "model"):
        assert_same(device / folder, host / folder)


@pytest.mark.parametrize(
    "first,then", [(HOST, "offload.optimizer=device"), ("offload.optimizer=device", HOST)]
)
def test_a_run_goes_on_with_its_state_elsewhere(tiny, metrics, tmp_path, first, then):
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    train(tiny(*SHORT, *COMPACT, first, output_dir=whole))
    train(tiny(*SHORT, *COMPACT, first, "training.max_steps=2", output_dir=moved))
    train(tiny(*SHORT, *COMPACT, then, "training.resume_from_checkpoint=auto", output_dir=moved))
    assert metrics(moved)[2:] == metrics(whole)[2:]
    assert_same(whole / "model", moved / "model")


def test_state_that_the_host_cannot_hold_is_refused_before_the_first_step(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(
        pinned_memory, "tightest_host_limit", lambda budget, file_bytes: HostLimit(1023, "little is left")
    )
    with pytest.raises(
        DoesNotFitError, match=r"offload\.optimizer=host needs .* more host memory, and little is left"
    ):
        train(tiny(*COMPACT, HOST, output_dir=tmp_path / "run"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
