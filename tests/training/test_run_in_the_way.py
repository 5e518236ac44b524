"""What is said of a folder that holds a run: only ways out that work, whatever became of the run."""

from __future__ import annotations

import re
import shutil

import pytest

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.folder.run_folder import RunFolder
from lowmem_ft.training.run.loop import train

GO_ON, REPLACE = "training.resume_from_checkpoint=auto", "training.overwrite_output_dir=true"
STEPS = ("training.max_steps=2", "training.save_steps=2", "training.eval_steps=null", "data.eval_size=null")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps with a checkpoint of the second."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train(load_recipe("tiny", [*STEPS, f"training.output_dir={run}", "training.use_cpu=true"]))
    return run


def without_checkpoint(run):
    shutil.rmtree(run / "checkpoint-2")


def without_model(run):
    shutil.rmtree(run / "model")


def stopped_at_once(run):
    without_checkpoint(run)
    without_model(run)


def stopped_in_its_first_save(run):
    without_model(run)
    (run / "checkpoint-2").rename(run / "checkpoint-2.incomplete")


def damaged(run):
    (run / "checkpoint-2" / "model.safetensors").write_bytes(b"")


def ruined(run):
    without_model(run)
    (run / "checkpoint-2").rename(run / "checkpoint-2.suspect")


@pytest.mark.parametrize(
    "become, settings, works",
    [
        (None, (), {GO_ON, REPLACE}),
        (without_checkpoint, (), {REPLACE}),
        (without_model, (), {GO_ON, REPLACE}),
        (stopped_at_once, (), {GO_ON, REPLACE}),
        (stopped_in_its_first_save, (), {GO_ON, REPLACE}),
        (damaged, (), {REPLACE}),
        (ruined, (), {GO_ON, REPLACE}),
        (None, ("training.seed=7",), {REPLACE}),
        (stopped_at_once, ("training.seed=7",), {REPLACE}),
        (None, ("training.max_steps=1",), {REPLACE}),
        (without_checkpoint, ("model={run}/model",), set()),
        (without_checkpoint, (GO_ON,), {REPLACE}),
        (without_checkpoint, ("data.path={run}/model/README.md", GO_ON), set()),
    ],
)
def test_what_is_advised_is_not_refused_and_nothing_else_would_work(
    finished, tiny, tmp_path, become, settings, works
):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    if become is not None:
        become(run)
    asked = [*STEPS, *(setting.format(run=run) for setting in settings)]
    with pytest.raises(
        UserError, match=rf"output_dir={run} holds (another|a finished) run.* [Cc]hoose another folder"
    ) as refused:
        RunFolder.open(tiny(*asked, output_dir=run))
    advised = set(re.findall(r"training\.\w+=(?:auto|true)", str(refused.value)))
    assert advised == works
    for way in (GO_ON, REPLACE):
        others = [setting for setting in asked if setting != GO_ON]
        if way in works:
            RunFolder.open(tiny(*others, way, output_dir=run))
        else:
            with pytest.raises(UserError):
                RunFolder.open(tiny(*others, way, output_dir=run))


def test_a_recipe_that_ends_before_its_checkpoint_is_told_before_the_imports(finished, tiny):
    with pytest.raises(UserError, match=r"checkpoint-2 is at step 2, but the recipe ends at step 1"):
        RunFolder.open(tiny(*STEPS, "training.max_steps=1", GO_ON, output_dir=finished))


def test_a_branch_that_was_stopped_before_its_first_checkpoint_begins_again(finished, tiny, tmp_path):
    branch = tmp_path / "branch"
    branched = tiny(*STEPS, f"training.resume_from_checkpoint={finished}/checkpoint-2", output_dir=branch)
    shutil.copytree(finished, branch)
    stopped_at_once(branch)
    assert RunFolder.open(branched).resume_from == finished / "checkpoint-2"
    shutil.copytree(finished / "model", branch / "model")
    with pytest.raises(UserError, match=r"a finished run \(.*\) without a checkpoint to resume from"):
        RunFolder.open(branched)


def test_in_place_of_a_checkpoint_that_is_not_whole_the_newest_whole_one_is_named(finished, tiny, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "checkpoint-4").mkdir()
    named = tiny(f"training.resume_from_checkpoint={run}/checkpoint-4", output_dir=run)
    with pytest.raises(UserError, match=rf"The newest complete checkpoint next to it is {run}/checkpoint-2"):
        RunFolder.open(named)


def test_in_place_of_a_run_the_newest_whole_checkpoint_in_it_is_named(finished, tiny, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "checkpoint-4").mkdir()
    with pytest.raises(UserError, match=rf"written last\. Did you mean {run}/checkpoint-2\?$"):
        RunFolder.open(tiny(f"training.resume_from_checkpoint={run}", output_dir=run))


def test_a_checkpoint_that_is_passed_over_is_told_once(finished, tiny, tmp_path, caplog):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    without_model(run)
    damaged(run)
    RunFolder.open(tiny(*STEPS, GO_ON, output_dir=run))
    assert caplog.text.count("Skipping it.") == 1
