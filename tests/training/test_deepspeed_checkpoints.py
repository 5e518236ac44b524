"""A run of DeepSpeed's engine goes on from a checkpoint, in as many processes or others, with the engine or without."""

from __future__ import annotations

import importlib.util
import shutil
import signal

import pytest
import torch
from processes import train_in_processes
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="deepspeed is not installed: make test-deepspeed",
    ),
    pytest.mark.usefixtures("compiled_deepspeed"),
]
SHARED = (
    "recipe=tiny",
    "training.max_steps=4",
    "training.save_steps=2",
    "training.eval_steps=null",
    "data.eval_size=null",
    "training.use_cpu=true",
    "budget.preflight=false",
    "training.full_determinism=true",
    "training.gradient_accumulation_steps=2",
)
AUTO = "training.resume_from_checkpoint=auto"
CASES = {"float32": (), "bfloat16": ("model.dtype=bfloat16",), "lora": ("adapter.name=lora",)}
OFFLOAD = {"offload": ("model.dtype=bfloat16", "distributed.cpu_offload=true")}
NEAR = {"float32": (1e-6, 2e-4), "bfloat16": (1e-3, 2e-2), "lora": (1e-6, 2e-4)}
"""Of losses, and of weights (in steps of 0.01), to those of one process: where a gradient is next to nothing, AdamW's
step is as long as anywhere, and its direction a matter of rounding."""


def train_in(forks, num_processes, strategy, folder, *options):
    """Twelve examples a step."""
    settings = (
        *SHARED,
        f"training.per_device_train_batch_size={6 // num_processes}",
        f"training.output_dir={folder}",
        *options,
    )
    train_in_processes(forks, num_processes, strategy, *settings)
    return folder


@pytest.fixture(scope="module")
def finished(forks, untied, tmp_path_factory):
    """Runs of four steps, by processes, strategy and case."""
    model = (f"model={untied}", "model.weights=pretrained", "model.tokenizer_name_or_path=null")

    def run(num_processes, strategy, case):
        key = (num_processes, strategy, case)
        if key not in runs:
            folder = tmp_path_factory.mktemp(f"{strategy}-{case}") / "run"
            runs[key] = train_in(forks, num_processes, strategy, folder, *model, *(CASES | OFFLOAD)[case])
        return runs[key]

    runs = {}
    run.options = model
    return run


def gone_on(forks, finished, run, num_processes, strategy, case, folder):
    """A copy of a run that was stopped after two steps, and has gone on."""
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "checkpoint-4")
    shutil.rmtree(folder / "model")
    train_in(forks, num_processes, strategy, folder, *finished.options, *(CASES | OFFLOAD)[case], AUTO)
    return folder


def tensors(folder):
    return {
        f"{file.name}: {name}": tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("case", CASES | OFFLOAD)
def test_as_many_processes_go_on_bit_for_bit(strategy, case, forks, finished, metrics, tmp_path):
    run = finished(2, strategy, case)
    again = gone_on(forks, finished, run, 2, strategy, case, tmp_path / "run")
    assert metrics(again) == metrics(run)
    assert metrics(again, "grad_norm") == metrics(run, "grad_norm")
    for folder in ("checkpoint-4", "model"):
        expected, got = tensors(run / folder), tensors(again / folder)
        assert expected
        assert expected.keys() == got.keys()
        assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


@pytest.mark.parametrize(
    "before, after, case",
    [
        ((2, "zero2"), (3, "zero2"), "float32"),
        ((2, "zero3"), (3, "zero3"), "float32"),
        ((2, "zero2"), (1, "none"), "float32"),
        ((2, "zero3"), (2, "fsdp2"), "float32"),
        ((2, "fsdp2"), (2, "zero3"), "float32"),
        ((2, "zero3"), (3, "zero2"), "bfloat16"),
        ((2, "zero2"), (1, "none"), "bfloat16"),
        ((2, "fsdp2"), (2, "zero3"), "bfloat16"),
        ((2, "zero2"), (3, "zero3"), "lora"),
        ((2, "zero3"), (1, "none"), "lora"),
        ((1, "none"), (2, "zero2"), "lora"),
    ],
    ids=str,
)
def test_others_go_on(before, after, case, forks, finished, metrics, tmp_path):
    again = gone_on(forks, finished, finished(*before, case), *after, case, tmp_path / "run")
    expected, (loss, weight) = finished(1, "none", case), NEAR[case]
    assert metrics(again) == pytest.approx(metrics(expected), rel=loss)
    saved, got = tensors(expected / "model"), tensors(again / "model")
    assert saved.keys() == got.keys()
    for name in saved:
        torch.testing.assert_close(got[name], saved[name], rtol=0, atol=weight)


SCRIPTED = """
import os, signal, sys
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.evaluation import run_evaluations
from lowmem_ft.training.evaluation.held_out_loss import EvaluationResult
from lowmem_ft.training.run.loop import TrainingRun, train

killed_after, losses, *settings = sys.argv[1:]
left, evaluate, step = map(float, losses.split(",")), run_evaluations.evaluate, TrainingRun.step

def scripted(*args, **kwargs):
    return EvaluationResult(next(left), evaluate(*args, **kwargs).num_label_tokens)

def dying(run):
    record = step(run)
    if record["step"] == int(killed_after):
        os.kill(os.getpid(), signal.SIGKILL)
    return record

run_evaluations.evaluate, TrainingRun.step = scripted, dying
result = train(load_recipe("tiny", settings))
assert (result.steps, result.best_step, result.evaluation.loss) == (8, 4, 1.0), result
assert (result.stopped is not None) == (os.environ["RANK"] == "0")  # callbacks are the main process's
"""
BEST = (
    "training.max_steps=20",
    "training.eval_steps=2",
    "training.save_steps=null",
    "training.save_total_limit=1",
    "training.load_best_model_at_end=true",
    "training.early_stopping_patience=2",
    "training.use_cpu=true",
    "budget.preflight=false",
)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_killed_run_goes_on_stops_early_and_finishes_with_its_best_model(
    strategy, adapter, forks, tmp_path
):
    """Held-out losses fall until step 4, and rise from there; the run is killed in between."""
    of_run = (*BEST, f"distributed.strategy={strategy}", f"adapter.name={adapter}")
    folder = tmp_path / "run"
    killed = forks.run_several(2, SCRIPTED, "5", "3,1", *of_run, f"training.output_dir={folder}")
    assert [process.returncode for process in killed] == [-signal.SIGKILL] * 2, killed[0].stderr
    assert sorted(file.name for file in folder.glob("checkpoint-*")) == ["checkpoint-4"]
    expected = tensors(folder / "checkpoint-4")
    for process in forks.run_several(2, SCRIPTED, "0", "2,3", *of_run, f"training.output_dir={folder}", AUTO):
        assert process.returncode == 0, process.stderr
    got = tensors(folder / "model")
    assert got
    assert [name for name in got if not torch.equal(expected[name], got[name])] == []


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_checkpoint_is_that_of_one_process_and_holds_no_pickle(strategy, finished):
    checkpoint, one = (
        run / "checkpoint-2" for run in (finished(2, strategy, "bfloat16"), finished(1, "none", "bfloat16"))
    )
    names = {file.name for file in one.iterdir()}
    assert {file.name for file in checkpoint.iterdir()} - {"random-state-1.json"} == names
    expected, got = tensors(one), tensors(checkpoint)
    assert {name: (t.shape, t.dtype) for name, t in got.items()} == {
        name: (t.shape, t.dtype) for name, t in expected.items()
    }
