"""What ends one process of a run ends the others, who say why; what is on disk goes on bit for bit."""

from __future__ import annotations

import shutil
import signal

import pytest
import torch
from processes import TRAIN
from safetensors.torch import load_file

from lowmem_ft.training.folder.checkpoint_folders import read_manifest

MEET_WITH = """
import os, signal, sys, time
import torch
from lowmem_ft.cli.commands.train import main
from lowmem_ft.data.batches.stream import DataStream
from lowmem_ft.models.files.shard_files import ShardWriter
from lowmem_ft.training.evaluation import held_out_loss
from lowmem_ft.training.processes import error_propagation

what, where = sys.argv.pop(1).split()
error_propagation.LOOK_EVERY_SECONDS = 0.2
# A busy machine takes its time to end by itself.
error_propagation.GRACE_SECONDS = 0.2 if what in ("stuck", "blocked") else 600
rank, counts = int(os.environ["RANK"]), {}

def fail():
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "full":
        raise OSError(28, "No space left on device")
    raise RuntimeError("something of rank 1 broke")

def at(time, owner, name, victim=1):
    of_theirs = getattr(owner, name)

    def counted(*args, **kwargs):
        counts[name] = counts.get(name, 0) + 1
        if counts[name] == time:
            if rank == victim:
                fail()
            elif what == "stuck":
                while True:  # as in an exchange that does not notice
                    pass
        return of_theirs(*args, **kwargs)

    setattr(owner, name, counted)

if what == "blocked":
    torch.distributed.destroy_process_group = signal.pause  # as NCCL's may wait for a process that is dead
if where == "step":
    at(5, DataStream, "next_window")
elif where == "evaluation":
    at(2, held_out_loss, "evaluation_loss")
elif where == "save":
    at(4, ShardWriter, "_write")  # the optimizer's state, of the second checkpoint
elif where == "main":
    at(4, ShardWriter, "_write", victim=0)
sys.exit(main())
"""

SETTINGS = (
    "recipe=tiny",
    "training.use_cpu=true",
    "budget.preflight=false",
    "distributed.strategy=fsdp2",
    "training.max_steps=6",
    "training.save_steps=2",
    "training.eval_steps=3",
    "training.gradient_accumulation_steps=1",
    "optimizer.master=split24",
    "optimizer.state=bf16",
    "model.dtype=bfloat16",
)


@pytest.fixture(scope="module")
def whole(forks, tmp_path_factory):
    """A run that nothing happens to."""
    run = tmp_path_factory.mktemp("whole") / "run"
    done = forks.run_two(TRAIN, *SETTINGS, f"training.output_dir={run}")
    assert [process.returncode for process in done] == [0, 0], said(done)
    return run


def meet_with(forks, what, where, run):
    return forks.run_two(MEET_WITH, f"{what} {where}", *SETTINGS, f"training.output_dir={run}")


def said(processes):
    return "".join(process.stderr for process in processes)


def assert_goes_on(forks, run, whole, metrics):
    settings = (*SETTINGS, "training.resume_from_checkpoint=auto", f"training.output_dir={run}")
    done = forks.run_two(TRAIN, *settings)
    assert [process.returncode for process in done] == [0, 0], said(done)
    assert "Resuming from" in said(done)
    assert metrics(run) == metrics(whole)
    first, second = (load_file(folder / "model" / "model.safetensors") for folder in (run, whole))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("step", marks=pytest.mark.slow),
        pytest.param("evaluation", marks=pytest.mark.slow),
        "save",
    ],
)
def test_the_other_says_that_a_process_was_killed(forks, whole, metrics, tmp_path, where):
    run = tmp_path / "run"
    left, killed = meet_with(forks, "killed", where, run)
    assert killed.returncode == -signal.SIGKILL
    assert left.returncode == 1, left.stderr
    assert "error: Another process has disappeared without a message" in left.stderr
    assert "Traceback" not in left.stderr
    assert (run / "checkpoint-2").exists()
    assert (run / "checkpoint-4").exists() == (where == "step")
    assert_goes_on(forks, run, whole, metrics)


def test_the_other_ends_where_the_main_process_was_killed(forks, tmp_path):
    """And with it the store that they met in."""
    killed, left = meet_with(forks, "killed", "main", tmp_path / "run")
    assert [killed.returncode, left.returncode] == [-signal.SIGKILL, 1], left.stderr
    assert "error: Another process has disappeared without a message" in left.stderr


def test_an_error_that_is_no_users_is_said_by_the_others(forks, tmp_path):
    left, failed = meet_with(forks, "broken", "step", tmp_path / "run")
    assert [left.returncode, failed.returncode] == [1, 1]
    assert "RuntimeError: something of rank 1 broke" in failed.stderr
    assert "error: Process 1 has failed, so the others end too. RuntimeError: something" in left.stderr


def test_a_process_that_does_not_notice_is_ended(forks, tmp_path):
    left, failed = meet_with(forks, "stuck", "step", tmp_path / "run")
    assert [left.returncode, failed.returncode] == [1, 1]
    assert "error: Process 1 has failed" in left.stderr


def test_processes_that_cannot_leave_their_group_end_all_the_same(forks, tmp_path):
    left, failed = meet_with(forks, "blocked", "step", tmp_path / "run")
    assert [left.returncode, failed.returncode] == [1, 1]
    assert "RuntimeError: something of rank 1 broke" in failed.stderr
    assert "error: Process 1 has failed" in left.stderr


@pytest.mark.parametrize("where", ["save", "main"])
def test_a_disk_that_is_full_for_one_is_so_for_both_and_said_once(forks, tmp_path, where):
    run = tmp_path / "run"
    done = meet_with(forks, "full", where, run)
    assert [process.returncode for process in done] == [2, 2], said(done)
    assert said(done).count("checkpoint-4 cannot be written: [Errno 28]") == 1
    assert not list(run.glob("*.incomplete"))
    read_manifest(run / "checkpoint-2")


def test_a_disk_that_is_full_for_the_finished_model_leaves_the_checkpoints(forks, whole, tmp_path):
    source = TRAIN.replace("import sys;", FULL_FOR_THE_MODEL)
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "model")
    settings = (*SETTINGS, "training.resume_from_checkpoint=auto", f"training.output_dir={run}")
    done = forks.run_two(source, *settings)
    assert [process.returncode for process in done] == [2, 2], said(done)
    assert said(done).count("model cannot be written: [Errno 28]") == 1
    assert (run / "checkpoint-6").exists()
    assert not list(run.glob("model*"))


FULL_FOR_THE_MODEL = """
import sys
from lowmem_ft.models import gathering
def full(*args): raise OSError(28, "No space left on device")
gathering.save_file = full
import sys;"""
