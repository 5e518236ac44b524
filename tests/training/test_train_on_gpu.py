"""What only a CUDA device can show; `make gpu-check` runs this."""

from __future__ import annotations

import contextlib

import pytest
import torch
from gpu_runs import (
    MOST_BYTES,
    RUNS,
    budget_of_one_mib,
    running_out_while_loading,
    settings_of_seven_layers,
    short_recipe,
)
from ladder_rungs import RUNGS, settings_of
from safetensors.torch import load_file

import lowmem_ft
from lowmem_ft.cli import main
from lowmem_ft.foundation.catalog.this_machine import this_machines_gpu
from lowmem_ft.foundation.errors import DoesNotFitError
from lowmem_ft.foundation.host.copy_engine import CopyEngine
from lowmem_ft.training.run.loop import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MILLISECONDS = 4_000_000
"""Some two, in the GPU's cycles."""


@pytest.mark.parametrize("overrides", RUNS, ids=lambda overrides: " ".join(overrides) or "fp32")
def test_a_run_learns_and_reports_the_devices_memory(tmp_path, metrics, overrides):
    result = train(short_recipe(tmp_path / "run", *overrides))
    losses = metrics(tmp_path / "run")
    assert losses[-1] < losses[0]
    (weights,) = result.model_folder.glob("*.safetensors")
    assert weights.name in ("model.safetensors", "adapter_model.safetensors")
    assert max(metrics(tmp_path / "run", "memory_peak_bytes")) < MOST_BYTES


@pytest.mark.parametrize("overrides", [(), ("training.mixed_precision=fp16",)])
def test_a_resumed_run_is_bitwise_the_same(tmp_path, metrics, overrides):
    deterministic = ("training.full_determinism=true", *overrides)
    train(short_recipe(tmp_path / "whole", *deterministic))
    train(short_recipe(tmp_path / "resumed", "training.max_steps=6", *deterministic))
    for folder in ("checkpoint-6", "model"):
        _remove(tmp_path / "resumed" / folder)
    train(short_recipe(tmp_path / "resumed", "training.resume_from_checkpoint=auto", *deterministic))
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "whole")
    one, other = (load_file(tmp_path / name / "model/model.safetensors") for name in ("whole", "resumed"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def seven_layers(tmp_path):
    return settings_of_seven_layers(tmp_path)


@pytest.mark.parametrize("max_grad_norm", ["null", "1.0"])
def test_each_rung_of_the_ladder_trains_as_the_one_below(max_grad_norm, seven_layers, tmp_path, metrics):
    """Copies, streams and events are only real here; a race would show as other losses."""
    losses = {}
    for index, rung in enumerate(RUNGS[3:]):
        folder = tmp_path / str(index)
        train(
            short_recipe(
                folder,
                *seven_layers,
                *settings_of(rung),
                f"training.max_grad_norm={max_grad_norm}",
            )
        )
        losses[rung.name] = metrics(folder)
    resident, in_backward, on_host, streamed, tiled = losses.values()
    assert on_host == in_backward
    assert streamed == in_backward
    assert in_backward == pytest.approx(resident, rel=5e-3)
    assert tiled == pytest.approx(resident, rel=5e-3)


@pytest.mark.parametrize("late", ["copies", "computing"])
def test_streamed_weights_wait_for_whoever_is_late(late, seven_layers, tmp_path, metrics, monkeypatch):
    """A copy of so small a layer takes microseconds: nobody would meet it on its way without being held up."""
    (streamed,) = (rung for rung in RUNGS if rung.name == "+ weights streamed")
    settings = (*seven_layers, *settings_of(streamed), "training.max_steps=3")
    train(short_recipe(tmp_path / "in_time", *settings))
    begin = CopyEngine._on

    @contextlib.contextmanager
    def begin_late(engine, stream, after):
        if late == "computing":
            torch.cuda._sleep(MILLISECONDS)
        with begin(engine, stream, after):
            if late == "copies":
                torch.cuda._sleep(MILLISECONDS)
            yield

    monkeypatch.setattr(CopyEngine, "_on", begin_late)
    train(short_recipe(tmp_path / "late", *settings))
    assert metrics(tmp_path / "late") == metrics(tmp_path / "in_time")


def test_a_budget_caps_the_allocator_for_the_run_alone(tmp_path):
    torch._C._cuda_clearCublasWorkspaces()  # of runs before this one: a tiny model fits into what they leave
    torch.cuda.empty_cache()
    one_mib = budget_of_one_mib(this_machines_gpu())
    with running_out_while_loading(one_mib):
        train(short_recipe(tmp_path / "run", f"budget={one_mib}"))
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    with pytest.raises(DoesNotFitError, match=r"budget\.device=1MiB leaves nothing for tensors"):
        train(short_recipe(tmp_path / "run", "budget=1MiB"))


def test_an_estimate_in_python_and_an_evaluation_leave_the_gpu_to_torch(tmp_path):
    """A virtual GPU in this process would be torch's accelerator from then on, and pinned memory its to give."""
    recipe = short_recipe(tmp_path / "run")
    estimate = lowmem_ft.estimate_memory(recipe)
    assert estimate.gpu.full_name == torch.cuda.get_device_name()
    assert torch.zeros(1).pin_memory().is_pinned()
    lowmem_ft.train(recipe)
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    assert torch.accelerator.current_accelerator().type == "cuda"


def _remove(folder):
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
