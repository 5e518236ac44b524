"""The runs of ``tests/training/test_train_on_gpu.py`` on the virtual GPU: all that is not about numbers."""

from __future__ import annotations

import pytest
from gpu_runs import KERNELS, MOST_BYTES, RUNS, budget_of_one_mib, settings_of_seven_layers, short_recipe
from ladder_rungs import RUNGS, settings_of

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.errors import DoesNotFitError
from lowmem_ft.foundation.host.copy_engine import CopyEngine
from lowmem_ft.training.run.loop import train

GPU = "rtx-4090"


ALSO_REHEARSED_ELSEWHERE = (
    (),
    ("training.mixed_precision=bf16",),
    ("data.packing=true", "training.mixed_precision=bf16"),
    *KERNELS,
)


def runs():
    for overrides in RUNS:
        marks = [pytest.mark.slow] if overrides in ALSO_REHEARSED_ELSEWHERE else []
        yield pytest.param(overrides, id=" ".join(overrides) or "fp32", marks=marks)


@pytest.mark.parametrize("overrides", runs())
def test_a_run_comes_to_its_end(rehearse, tmp_path, overrides):
    recipe = short_recipe(tmp_path / "run", *overrides)
    found = rehearse(recipe, GPU)
    assert found.fits
    assert (found.rehearsed_steps, [saved.at_step for saved in found.checkpoints]) == (6, [3, 6])
    assert found.model is not None
    assert found.longest.peak_bytes < MOST_BYTES
    assert found.estimate.races == ()


@pytest.mark.parametrize(
    "overrides",
    [pytest.param((), marks=pytest.mark.slow, id="fp32"), ("training.mixed_precision=fp16",)],
)
def test_a_run_goes_on_deterministically(rehearse, tmp_path, overrides):
    """Kernels without a deterministic variant are refused on the way, as CUDA refuses them."""
    deterministic = ("training.full_determinism=true", "training.max_steps=6")
    train(short_recipe(tmp_path / "run", *deterministic, "training.max_steps=3", "training.use_cpu=true"))
    longer = short_recipe(
        tmp_path / "run", *deterministic, *overrides, "training.resume_from_checkpoint=auto"
    )
    found = rehearse(longer, GPU)
    assert (found.rehearsed_steps, found.longest.at_step) == (3, 4)


@pytest.fixture
def seven_layers(tmp_path):
    return settings_of_seven_layers(tmp_path)


@pytest.mark.slow  # tests/invariants/test_no_races.py has a step of each
@pytest.mark.parametrize("max_grad_norm", ["null", "1.0"])
@pytest.mark.parametrize("rung", RUNGS[3:], ids=lambda rung: rung.name)
def test_each_rung_of_the_ladder_has_its_copies_in_order(
    rehearse, rung, max_grad_norm, seven_layers, tmp_path
):
    settings = (*seven_layers, *settings_of(rung), f"training.max_grad_norm={max_grad_norm}")
    found = rehearse(short_recipe(tmp_path / "run", *settings), GPU, steps=2)
    assert found.estimate.races == ()


@pytest.mark.slow  # tests/invariants/test_checked_streams.py leaves out each ordering
def test_streamed_weights_that_do_not_wait_are_found(rehearse, seven_layers, tmp_path, monkeypatch):
    """On a device they are late by a kernel that sleeps; here nothing has to be late."""
    (streamed,) = (rung for rung in RUNGS if rung.name == "+ weights streamed")
    settings = (*seven_layers, *settings_of(streamed))
    begin = CopyEngine._on
    monkeypatch.setattr(
        CopyEngine, "_on", lambda engine, stream, after: begin(engine, stream, [engine.now()])
    )
    assert rehearse(short_recipe(tmp_path / "run", *settings), GPU, steps=2).estimate.races


def test_a_budget_caps_the_allocator_for_the_run_alone(rehearse, small_settings, tmp_path):
    gpu = find_gpu(GPU)
    one_mib = budget_of_one_mib(gpu)
    found = rehearse(short_recipe(tmp_path / "run", *small_settings, f"budget={one_mib}"), gpu)
    assert not found.fits
    assert found.failure is not None
    assert found.failure.phase == "load"
    with pytest.raises(DoesNotFitError, match=r"budget\.device=1MiB leaves nothing for tensors"):
        rehearse(short_recipe(tmp_path / "run", *small_settings, "budget=1MiB"), gpu)
