"""Checkpoints that are there and not good: found out before the imports, passed over, and named."""

from __future__ import annotations

import json
import shutil

import pytest

from lowmem_ft.foundation.errors import CheckpointError
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.folder.checkpoint_folders import read_manifest
from lowmem_ft.training.folder.run_folder import RunFolder
from lowmem_ft.training.run.loop import train

NO_EVALUATION = ("data.eval_size=null", "training.eval_steps=null")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps with a checkpoint of each."""
    run = tmp_path_factory.mktemp("finished") / "run"
    of_the_run = (f"training.output_dir={run}", "training.use_cpu=true", *NO_EVALUATION)
    train(load_recipe("tiny", ["training.max_steps=2", "training.save_steps=1", *of_the_run]))
    return run


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it, to be damaged."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def going_on(tiny, run):
    """The recipe that goes on with it."""
    steps = ("training.max_steps=3", "training.save_steps=1", "training.resume_from_checkpoint=auto")
    return tiny(*steps, *NO_EVALUATION, output_dir=run)


def in_manifest(change):
    """A damage: what the function makes of ``checkpoint.json``, or does to it."""

    def damage(checkpoint):
        file = checkpoint / "checkpoint.json"
        manifest = json.loads(file.read_text())
        file.write_text(json.dumps(change(manifest) or manifest))

    return damage


def in_progress(**fields):
    return in_manifest(lambda manifest: manifest["progress"].update(fields))


def at_the_start_of(name, content):
    """A damage: another beginning, of a file that is as long as it was."""

    def damage(checkpoint):
        file = checkpoint / name
        file.write_bytes(content + file.read_bytes()[len(content) :])

    return damage


DAMAGES = {
    "a list": in_manifest(lambda manifest: [manifest]),
    "files without sizes": in_manifest(lambda manifest: manifest.update(files=["a"])),
    "no progress": in_manifest(lambda manifest: manifest.update(progress=None)),
    "half a progress": in_progress(position={"epoch": 0}),
    "a step in words": in_progress(step="two"),
    "a step before the first": in_progress(step=-2),
    "a progress of other fields": in_progress(x=1),
    "no optimizer": in_manifest(lambda manifest: {**manifest, "optimizer": None}),
    "weights overwritten": at_the_start_of("model.safetensors", bytes(200)),
    "state overwritten": at_the_start_of("optimizer-00000.safetensors", b"\xff" * 8),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_named_and_passed_over(run, going_on, damage, caplog):
    DAMAGES[damage](run / "checkpoint-2")
    assert RunFolder.open(going_on).resume_from == run / "checkpoint-1"
    assert f"{run / 'checkpoint-2'} is " in caplog.text
    with pytest.raises(CheckpointError, match=r"checkpoint-2 is (damaged|not a complete checkpoint)"):
        read_manifest(run / "checkpoint-2")


def test_one_with_the_name_of_another_step_is_passed_over_and_its_own_name_told(run, going_on, caplog):
    (run / "checkpoint-9").symlink_to("checkpoint-1")
    assert RunFolder.open(going_on).resume_from == run / "checkpoint-2"
    assert "checkpoint-9 is the checkpoint of step 1. Name it checkpoint-1" in caplog.text
    (run / "checkpoint-1").rename(run / "the-best")
    read_manifest(run / "the-best")  # any other name will do


@pytest.mark.parametrize("content", [b"[]", b"{}", b"\0"])
def test_a_damaged_random_state_is_named(run, going_on, content):
    file = run / "checkpoint-2" / "random-state-0.json"
    file.write_bytes(content.ljust(file.stat().st_size))
    manifest = run / "checkpoint-2" / "checkpoint.json"
    older = {key: value for key, value in json.loads(manifest.read_text()).items() if key != "checksums"}
    manifest.write_text(json.dumps(older))  # which had none
    with pytest.raises(CheckpointError, match=r"random-state-0\.json has no state of the random generators"):
        train(going_on)


@pytest.mark.parametrize("line", ["[1]", '{"loss": 1}', '{"step": "one"}'])
def test_a_line_of_metrics_without_a_step_is_named(run, going_on, line):
    (run / "metrics.jsonl").write_text(f"{line}\n")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl, line 1, is not from a run of lowmem_ft"):
        train(going_on)
