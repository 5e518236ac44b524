"""A run that was stopped and resumed is the run that was not, bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lowmem_ft.foundation.errors import CheckpointError, Interrupted, UserError
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.folder.run_folder import RunFolder
from lowmem_ft.training.run.loop import train

SCRIPT = Path(__file__).parents[2] / "scripts" / "finetune.py"


def interrupt_at(monkeypatch, step, number):
    """Send this process a signal while it writes the metrics of a step."""
    write = RunFolder.write_metrics

    def write_and_interrupt(self, record):
        write(self, record)
        if record["step"] == step and "loss" in record:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(RunFolder, "write_metrics", write_and_interrupt)


def assert_same_model(one: Path, other: Path):
    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def with_dropout(tmp_path):
    """The tiny model with dropout, so that the random state matters."""
    folder = tmp_path / "model_with_dropout"
    shutil.copytree(SCRIPT.parents[1] / "recipes" / "tiny", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.2}))
    return f"model={folder}"


SHORT = ("training.max_steps=9", "training.save_steps=4", "training.eval_steps=null")


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), marks=pytest.mark.slow),
        ("data.packing=true", "optimizer.name=adamw_bnb_8bit"),
        (
            "data.group_by_length=true",
            "optimizer.name=lion",
            "model.dtype=bfloat16",
            "training.lr_scheduler_type=linear",
            "training.warmup_steps=3",
        ),
        pytest.param(
            (
                "data.streaming=true",
                "data.eval_size=null",
                "training.mixed_precision=bf16",
                "checkpointing.mode=none",
                "loss.chunk_tokens=null",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (
                "model.dtype=bfloat16",
                "optimizer.state=8bit",
                "optimizer.master=split24",
                "offload.optimizer=host",
            ),
            marks=pytest.mark.slow,
        ),
        (
            "model.dtype=bfloat16",
            "optimizer.state={exp_avg: bf16, exp_avg_sq: fp32}",
            "optimizer.master=split24",
            "optimizer.in_backward=true",
            "accumulation.order=vertical",
            "offload.optimizer=host",
        ),
        (
            "model.dtype=bfloat16",
            "optimizer.master=split16",
            "training.gradient_accumulation_steps=2",
            "accumulation.fusion=true",
            "accumulation.dtype=weights",
            "checkpointing.mode=full",
            "checkpointing.skip_last_layers=1",
            "checkpointing.mlp_activation=recompute",
            "offload.activations=inputs",
        ),
    ],
    ids=lambda overrides: " ".join(overrides) or "plain",
)
@pytest.mark.parametrize("number,code", [(signal.SIGTERM, 143)])
def test_a_run_stopped_by_a_signal_goes_on_bit_for_bit(
    tiny, metrics, with_dropout, tmp_path, monkeypatch, overrides, number, code
):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    arguments = (with_dropout, *SHORT, *overrides)
    train(tiny(*arguments, output_dir=whole))
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5, number)
        with pytest.raises(Interrupted) as stop:
            train(tiny(*arguments, output_dir=stopped))
    assert stop.value.exit_code == code
    assert stop.value.checkpoint == stopped / "checkpoint-5"
    assert (stopped / "checkpoint-5" / "checkpoint.json").exists()
    train(tiny(*arguments, "training.resume_from_checkpoint=auto", output_dir=stopped))
    for key in ("loss", "grad_norm", "learning_rate", "tokens"):
        assert metrics(stopped, key) == metrics(whole, key)
    assert metrics(stopped, "step") == list(range(1, 10))
    assert_same_model(whole / "model", stopped / "model")


def test_dropout_makes_the_random_state_matter(tiny, metrics, with_dropout, tmp_path):
    """The test above could not fail without this."""
    train(tiny(with_dropout, *SHORT, output_dir=tmp_path / "one"))
    train(
        tiny(with_dropout, *SHORT, "training.max_steps=9", "training.seed=43", output_dir=tmp_path / "other")
    )
    assert metrics(tmp_path / "one") != metrics(tmp_path / "other")


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)])
def test_a_signal_saves_and_exits_with_its_code(tiny, monkeypatch, tmp_path, number, code):
    interrupt_at(monkeypatch, 2, number)
    with pytest.raises(Interrupted) as stop:
        train(tiny(output_dir=tmp_path / "run"))
    assert stop.value.exit_code == code
    assert (tmp_path / "run" / "checkpoint-2" / "checkpoint.json").exists()


def test_a_signal_during_evaluation_stops_it_and_saves(tiny, monkeypatch, tmp_path):
    from lowmem_ft.training.evaluation import held_out_loss

    forward = held_out_loss.evaluation_loss

    def interrupted(session, batches):
        os.kill(os.getpid(), signal.SIGTERM)
        return forward(session, batches)

    monkeypatch.setattr(held_out_loss, "evaluation_loss", interrupted)
    with pytest.raises(Interrupted) as stop:
        train(tiny("training.eval_steps=3", output_dir=tmp_path / "run"))
    assert stop.value.exit_code == 143
    assert (tmp_path / "run" / "checkpoint-3" / "checkpoint.json").exists()


KILL_AT_ANY_MOMENT = f"""
import os, runpy, signal, sys, threading, time
from pathlib import Path

def kill_soon(file, step):
    while not file.exists() or file.read_text().count(chr(10)) < step:
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGKILL)

killed, step, *sys.argv[1:] = sys.argv[1:]
threading.Thread(target=kill_soon, args=(Path(killed, "metrics.jsonl"), int(step)), daemon=True).start()
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def test_a_killed_run_goes_on_bit_for_bit(tiny, metrics, forks, tmp_path):
    """SIGKILL cannot be caught: what counts is what was on disk."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    overrides = ("training.max_steps=18", "training.save_steps=3", "training.eval_steps=null")
    train(tiny(*overrides, output_dir=whole))
    step = random.randint(4, 8)
    settings = ("recipe=tiny", "training.use_cpu=true", f"training.output_dir={killed}", *overrides)
    done = forks.run(KILL_AT_ANY_MOMENT, str(killed), str(step), *settings)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (killed / "model").exists(), f"killed too late, at step {step}"
    train(tiny(*overrides, "training.resume_from_checkpoint=auto", output_dir=killed))
    assert metrics(killed) == metrics(whole), f"killed at step {step}"
    assert_same_model(whole / "model", killed / "model")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of nine steps that has come to its end."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train(load_recipe("tiny", ["training.use_cpu=true", f"training.output_dir={run}", *SHORT]))
    return run


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it, to be spoilt."""
    return shutil.copytree(finished, tmp_path / "run")


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tiny, metrics, run, caplog):
    losses = metrics(run)
    weights = run / "checkpoint-8" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with caplog.at_level("WARNING"):
        train(tiny(*SHORT, "training.resume_from_checkpoint=auto", output_dir=run))
    assert "checkpoint-8 is damaged: model.safetensors" in caplog.text
    assert metrics(run) == losses


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer-00000.safetensors", "random-state-0.json"])
def test_a_bit_that_a_disk_has_changed_ends_a_resumed_run_before_its_first_step(tiny, run, name):
    file = run / "checkpoint-8" / name
    written = bytearray(file.read_bytes())
    written[-2] ^= 1
    file.write_bytes(written)
    with pytest.raises(
        CheckpointError, match=rf"checkpoint-8 is damaged: {name} has other bytes than were written"
    ):
        train(tiny(*SHORT, "training.resume_from_checkpoint=auto", output_dir=run))


def test_a_checkpoint_from_before_there_were_checksums_resumes(tiny, metrics, run):
    losses, manifest = metrics(run), run / "checkpoint-8" / "checkpoint.json"
    written = json.loads(manifest.read_text())
    del written["checksums"]
    manifest.write_text(json.dumps(written))
    train(tiny(*SHORT, "training.resume_from_checkpoint=auto", output_dir=run))
    assert metrics(run) == losses


def test_checkpoints_and_resumed_models_keep_the_cache_of_generation(tiny, tmp_path):
    """Training goes without a key-value cache; a saved config that says so would make generation slow for good."""
    run = tmp_path / "run"
    shared = ("checkpointing.mode=full", "training.eval_steps=null", "training.save_steps=2")
    train(tiny(*shared, "training.max_steps=2", output_dir=run))
    train(tiny(*shared, "training.max_steps=4", "training.resume_from_checkpoint=auto", output_dir=run))
    for folder in ("checkpoint-2", "model"):
        assert json.loads((run / folder / "config.json").read_text())["use_cache"] is True


def test_an_incomplete_checkpoint_is_never_picked_up(tiny, run):
    (run / "checkpoint-8" / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match=r"not a complete checkpoint.*next to it is .*checkpoint-4"):
        RunFolder.open(tiny(f"training.resume_from_checkpoint={run / 'checkpoint-8'}", output_dir=run))
    assert RunFolder.open(tiny("training.resume_from_checkpoint=auto", output_dir=run)).resume_from == (
        run / "checkpoint-4"
    )


def test_auto_starts_afresh_where_there_is_nothing(tiny, tmp_path):
    result = train(tiny(*SHORT, "training.resume_from_checkpoint=auto", output_dir=tmp_path / "run"))
    assert result.steps == 9


@pytest.mark.parametrize("change", ["training.seed=7", "optimizer.name=sgd", "data.max_length=64"])
def test_another_recipe_cannot_continue_a_run(tiny, run, change):
    with pytest.raises(CheckpointError, match=change.split("=")[0]):
        RunFolder.open(tiny(*SHORT, change, "training.resume_from_checkpoint=auto", output_dir=run))


def test_a_folder_with_another_run_is_not_touched(tiny, run):
    before = sorted(path.name for path in run.iterdir())
    with pytest.raises(UserError, match=r"holds another run.*overwrite_output_dir=true"):
        train(tiny(*SHORT, output_dir=run))
    assert sorted(path.name for path in run.iterdir()) == before


def test_overwriting_removes_the_old_run_and_nothing_else(tiny, metrics, run):
    (run / "notes.txt").write_text("mine")
    train(tiny("training.max_steps=3", "training.overwrite_output_dir=true", output_dir=run))
    assert metrics(run, "step") == [1, 2, 3]
    assert (run / "notes.txt").exists()
    assert not (run / "checkpoint-8").exists()


def test_no_more_checkpoints_are_kept_than_asked_for(tiny, tmp_path):
    run = tmp_path / "run"
    train(
        tiny("training.max_steps=9", "training.save_steps=2", "training.save_total_limit=3", output_dir=run)
    )
    assert sorted(path.name for path in run.glob("checkpoint-*")) == [
        "checkpoint-4",
        "checkpoint-6",
        "checkpoint-8",
    ]


def test_a_run_that_was_killed_before_it_deleted_the_oldest_deletes_it_at_its_end(tiny, tmp_path):
    """A run that goes on from its last step saves no checkpoint any more."""
    run, limit = tmp_path / "run", "training.save_total_limit=2"
    steps = ("training.max_steps=6", "training.save_steps=2", "training.eval_steps=null")
    train(tiny(*steps, limit, output_dir=run))
    oldest = run / "checkpoint-2"
    shutil.copytree(run / "checkpoint-4", oldest)
    train(tiny(*steps, limit, "training.resume_from_checkpoint=auto", output_dir=run))
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
