"""Runs with streamed weights: losses, saved models and resumed runs are bitwise those with resident ones."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from sweeps import few_quick

from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.training.run.loop import train

IN_BACKWARD = (
    "optimizer.in_backward=true",
    "accumulation.order=vertical",
    "offload.optimizer=host",
    "training.max_steps=6",
    "training.save_steps=3",
    "training.eval_steps=3",
    "training.learning_rate=1e-3",
)
STREAM = "offload.parameters=stream"
COMPACT = ("model.dtype=bfloat16", "optimizer.master=split24", "optimizer.state=8bit")
RUNS = {
    "clipped": (),
    "not clipped": ("training.max_grad_norm=null",),
    "compact, in tiles": (*COMPACT, "tiling.head=3"),
    "compact, not clipped": (*COMPACT, "training.max_grad_norm=null"),
    "one layer stays": ("offload.resident_layers=1",),
    "lion, stock loss": ("optimizer.name=lion", "loss.chunk_tokens=null"),
}
QUICK = ("clipped", "compact, not clipped", "one layer stays", "lion, stock loss")


def weights_of(result):
    return load_file(result.model_folder / "model.safetensors")


@pytest.mark.parametrize("run", few_quick(RUNS, QUICK))
def test_a_streamed_run_is_the_resident_run(run, tiny, metrics, tmp_path):
    plain, streamed = tmp_path / "plain", tmp_path / "streamed"
    resident = [setting for setting in RUNS[run] if "resident_layers" not in setting]
    expected = train(tiny(*IN_BACKWARD, *resident, output_dir=plain))
    result = train(tiny(*IN_BACKWARD, STREAM, *RUNS[run], output_dir=streamed))
    assert metrics(streamed) == metrics(plain)
    assert metrics(streamed, "grad_norm") == metrics(plain, "grad_norm")
    assert result.evaluation == expected.evaluation
    ours, theirs = weights_of(result), weights_of(expected)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("run", ["clipped", "compact, not clipped"])
def test_a_streamed_run_goes_on_from_its_checkpoint(run, tiny, metrics, tmp_path):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    settings = (*IN_BACKWARD, STREAM, *RUNS[run], "training.lr_scheduler_type=constant")
    expected = train(tiny(*settings, output_dir=whole))
    train(tiny(*settings, "training.max_steps=3", output_dir=parted))
    resumed = train(tiny(*settings, "training.resume_from_checkpoint=auto", output_dir=parted))
    assert metrics(parted)[3:] == metrics(whole)[3:]
    ours, theirs = weights_of(resumed), weights_of(expected)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    "kind", ["model.quantization=none", "model.quantization=nf4", "adapter.modules_to_save=[embed_tokens]"]
)
def test_adapters_train_over_a_streamed_base(kind, tiny, metrics, tmp_path):
    pytest.importorskip("peft")
    settings = ["adapter.name=lora", kind, "training.max_steps=3"]
    plain, streamed = tmp_path / "plain", tmp_path / "streamed"
    train(tiny(*settings, output_dir=plain))
    train(tiny(*settings, STREAM, output_dir=streamed))
    assert metrics(streamed) == metrics(plain)


def test_an_estimate_shows_what_streaming_frees(tiny):
    resident = estimate_memory(tiny(*IN_BACKWARD, *COMPACT), gpu="a100-80gb")
    streamed = estimate_memory(tiny(*IN_BACKWARD, *COMPACT, STREAM), gpu="a100-80gb")
    weights = resident.by_category_at_peak["parameter"]
    assert streamed.by_category_at_peak["parameter"] < weights
    assert streamed.host_pinned_bytes > resident.host_pinned_bytes
