"""Runs that update in backward and accumulate vertically, beside the plain run of the same recipe."""

from __future__ import annotations

import dataclasses
import math
import os
import signal

import pytest
import torch
from measuring.comparison import estimated_peaks
from measuring.real_run import run_for_real
from safetensors.torch import load_file

from lowmem_ft.foundation.errors import Interrupted, RecipeError, UserError
from lowmem_ft.foundation.parallel_plan import ParallelPlan
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.folder.run_folder import RunFolder
from lowmem_ft.training.run.loop import train
from lowmem_ft.training.runtimes.accelerate_runtime import launched_runtime
from lowmem_ft.training.runtimes.build import plan_session
from lowmem_ft.training.step import step as step_module

SHORT = ("training.max_steps=6", "training.save_steps=4", "training.eval_steps=2")
ONE = ("training.gradient_accumulation_steps=1", "optimizer.in_backward=true")
VERTICAL = ("training.gradient_accumulation_steps=3", "accumulation.order=vertical")
BOTH = (*VERTICAL, "optimizer.in_backward=true")
COMPACT = ("model.dtype=bfloat16", "optimizer.master=split16", "optimizer.state=8bit")


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def is_equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def run(tiny, tmp_path):
    """Train the recipe `tiny` with overrides, in a folder of that name."""

    def trained(name, *overrides):
        train(tiny(*SHORT, *overrides, output_dir=tmp_path / name))
        return tmp_path / name

    return trained


@pytest.mark.parametrize(
    "overrides",
    [
        ("training.max_grad_norm=null",),
        ("training.max_grad_norm=null", *COMPACT),
        ("training.max_grad_norm=null", "optimizer.name=adafactor"),
        pytest.param(("training.max_grad_norm=1e6",), marks=pytest.mark.slow),
        ("training.max_grad_norm=1e6", "offload.optimizer=host", "optimizer.name=lion"),
    ],
    ids=" ".join,
)
def test_a_run_without_accumulation_is_bitwise_the_plain_one(run, metrics, overrides):
    plain = run("plain", "training.gradient_accumulation_steps=1", *overrides)
    ours = run("ours", *ONE, *overrides)
    assert metrics(ours) == metrics(plain)
    assert metrics(ours, "grad_norm") == pytest.approx(metrics(plain, "grad_norm"), rel=1e-6)
    assert is_equal(weights(ours), weights(plain))


@pytest.mark.parametrize("overrides", [VERTICAL, (*BOTH, "data.packing=true")], ids=" ".join)
def test_vertical_order_changes_the_order_of_sums_alone(run, metrics, overrides):
    horizontal = [o for o in overrides if not o.startswith(("optimizer", "accumulation"))]
    plain, ours = run("plain", *horizontal), run("ours", *overrides)
    assert metrics(ours, "tokens") == metrics(plain, "tokens")
    # Adam's first steps divide small gradients by their own size, whatever their last bit.
    assert metrics(ours)[:2] == pytest.approx(metrics(plain)[:2], rel=1e-6)
    assert metrics(ours) == pytest.approx(metrics(plain), rel=1e-4)
    assert metrics(ours, "grad_norm")[0] == pytest.approx(metrics(plain, "grad_norm")[0], rel=1e-6)


def interrupt_at(monkeypatch, step):
    write = RunFolder.write_metrics

    def write_and_interrupt(self, record):
        write(self, record)
        if record["step"] == step and "loss" in record:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunFolder, "write_metrics", write_and_interrupt)


@pytest.mark.parametrize(
    "overrides", [(*BOTH, *COMPACT, "offload.optimizer=host"), (*VERTICAL, *COMPACT)], ids=" ".join
)
def test_a_stopped_run_goes_on_bit_for_bit(tiny, run, metrics, tmp_path, monkeypatch, overrides):
    whole = run("whole", *overrides)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        with pytest.raises(Interrupted):
            run("stopped", *overrides)
    stopped = run("stopped", *overrides, "training.resume_from_checkpoint=auto")
    assert metrics(stopped) == metrics(whole)
    assert metrics(stopped, "grad_norm") == metrics(whole, "grad_norm")
    assert is_equal(weights(stopped), weights(whole))


def overflow_at(monkeypatch, step):
    """Make the loss of one step infinite, as the model gives it."""
    forward, calls = step_module._forward, []

    def overflowing(session, batch, *args, **kwargs):
        loss, of_routers = forward(session, batch, *args, **kwargs)
        if session.model.training:
            calls.append(batch)
        return loss * (math.inf if len(calls) == step and session.model.training else 1), of_routers

    monkeypatch.setattr(step_module, "_forward", overflowing)


def test_a_step_that_is_not_finite_is_skipped_as_ever_where_gradients_wait(run, metrics, monkeypatch):
    overflow_at(monkeypatch, 5)
    folder = run("run", *BOTH)
    assert metrics(folder, "skipped_steps") == [0, 0, 0, 0, 1, 1]


def test_half_a_step_ends_the_run_and_names_the_checkpoint_to_go_back_to(run, monkeypatch, tmp_path):
    overflow_at(monkeypatch, 5)
    with pytest.raises(UserError, match=r"Step 5 was not finite.*resume from \S*checkpoint-4.*max_grad_norm"):
        run("run", *BOTH, "training.max_grad_norm=null")
    assert not (tmp_path / "run" / "model").exists()


def test_half_a_step_without_a_checkpoint_starts_anew(run, monkeypatch):
    overflow_at(monkeypatch, 1)
    with pytest.raises(UserError, match="no checkpoint yet, so start again"):
        run("run", *BOTH, "training.max_grad_norm=null")


@pytest.mark.parametrize(
    "overrides,message",
    [
        (
            ("optimizer.in_backward=true", "training.gradient_accumulation_steps=4"),
            r"optimizer.in_backward needs accumulation.order=vertical when gradient_accumulation_steps > 1, got 4 with "
            r"horizontal. Set accumulation.order=vertical or optimizer.in_backward=false",
        ),
        (
            (*ONE, "optimizer.name=adamw_bnb_8bit"),
            r"in_backward=true needs optimizer.name=adamw.* got adamw_bnb_8bit",
        ),
        (
            (*ONE, "training.mixed_precision=fp16", "training.max_grad_norm=null", "model.dtype=float32"),
            r"fp16 needs training.max_grad_norm",
        ),
        ((*VERTICAL, "checkpointing.mode=none"), r"vertical needs every layer checkpointed.*got none"),
        ((*VERTICAL, "checkpointing.every_n_layers=2"), r"vertical needs .* with every_n_layers=2"),
        ((*VERTICAL, "checkpointing.skip_last_layers=1"), r"vertical needs .* skip_last_layers=1"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_the_way_out(tiny, overrides, message):
    with pytest.raises(RecipeError, match=message):
        tiny(*overrides)


def test_several_processes_that_hold_all_weights_are_refused_with_the_way_out(tiny, tmp_path):
    recipe = tiny(*BOTH, "offload.optimizer=host", "model.dtype=bfloat16")
    runtime = launched_runtime(recipe.training, tmp_path)
    runtime.ranks.plan = ParallelPlan(num_processes=2)
    with pytest.raises(UserError) as error:
        plan_session(recipe, runtime)
    [problem] = error.value.problems  # state may wait on the host
    assert problem.startswith(
        "optimizer.in_backward=true works in one process, or with distributed.strategy=fsdp2"
    )
    assert problem.endswith(
        "Set optimizer.in_backward=false, or start one process, or set distributed.strategy=fsdp2."
    )


def test_the_sum_of_bfloat16_gradients_is_kept_in_float32(run, caplog):
    caplog.set_level("INFO")
    run("run", "model.dtype=bfloat16", "training.gradient_accumulation_steps=2")
    assert "summed in float32" in caplog.text
    caplog.clear()
    run("own", "model.dtype=bfloat16", "training.gradient_accumulation_steps=2", "accumulation.dtype=weights")
    assert "summed in float32" not in caplog.text


T4 = ("model.dtype=float32", "training.mixed_precision=fp16")


def on_t4(*overrides):
    recipe = load_recipe("tiny", ["data.max_length=64", "training.gradient_accumulation_steps=2", *overrides])
    return estimate_memory(recipe, gpu="t4")


@pytest.mark.parametrize("overrides", [T4, (*T4, *BOTH, "offload.optimizer=host")], ids=" ".join)
def test_loss_scaling_goes_with_accumulation_and_clipping(overrides):
    assert on_t4(*overrides).allocated_peak_bytes > 0


@pytest.mark.parametrize(
    "overrides",
    [
        ("training.mixed_precision=bf16",),
        ("model.dtype=bfloat16",),
        COMPACT,
        ("model.dtype=float16",),
        (*T4[1:], "model.dtype=bfloat16"),
    ],
    ids=" ".join,
)
def test_what_a_card_without_bfloat16_cannot_do_is_refused(overrides):
    with pytest.raises(UserError, match=r"Set model.dtype="):
        on_t4(*overrides)


def test_an_estimate_sees_which_gradients_are_gone():
    def peak_of_the_step(*overrides):
        recipe = load_recipe("tiny", [*VERTICAL, *overrides])
        return estimate_memory(recipe, gpu="a100-80gb").by_phase["optimizer_step"]

    after = peak_of_the_step()
    assert peak_of_the_step("optimizer.in_backward=true", "training.max_grad_norm=null") < after - 4 * 41_000


def test_gradients_on_the_host_leave_none_on_the_device_for_the_next_step():
    def peak_of_forward(*overrides):
        recipe = load_recipe("tiny", [*BOTH, "offload.optimizer=host", *overrides])
        return estimate_memory(recipe, gpu="a100-80gb").by_phase["forward"]

    one_scale = 512
    assert peak_of_forward() - peak_of_forward("training.max_grad_norm=null") <= one_scale


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((*BOTH, "training.max_grad_norm=null"), marks=pytest.mark.slow),
        (*BOTH, *COMPACT, "offload.optimizer=host"),
        ("training.gradient_accumulation_steps=3", "model.dtype=bfloat16", "data.packing=true"),
    ],
    ids=" ".join,
)
def test_a_trace_takes_what_a_real_run_does(overrides):
    recipe = load_recipe("tiny", ["training.use_cpu=true", *overrides])
    measured = dataclasses.asdict(run_for_real(recipe))["allocated"]
    estimated = estimated_peaks(estimate_memory(recipe, "cpu"))["allocated"]
    assert estimated == pytest.approx(measured, rel=0.005)
