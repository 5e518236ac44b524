"""Replacing a run: the old one is there until the new one has succeeded, and other people's files always."""

from __future__ import annotations

import pytest
from filelock import FileLock

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.training.folder.replaced_run import allocator_file
from lowmem_ft.training.folder.run_folder import RunFolder
from lowmem_ft.training.run import loop
from lowmem_ft.training.run.loop import train

ONE_STEP = (
    "training.max_steps=1",
    "training.save_steps=1",
    "training.eval_steps=null",
    "data.eval_size=null",
)
REPLACE = "training.overwrite_output_dir=true"
FOREIGN = (
    "notes.txt",
    "checkpoint-best/weights.bin",
    "checkpoint-foo.incomplete/x",
    "logs/other/events",
    "replaced-9/x",
)


def names(folder):
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def run(tiny, tmp_path):
    """A finished run among files of other people."""
    folder = tmp_path / "run"
    train(tiny(*ONE_STEP, output_dir=folder))
    for name in FOREIGN:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    return folder


def test_a_replaced_run_is_gone_once_the_new_one_has_succeeded(tiny, run):
    for process_index in (0, 1):
        (run / allocator_file(process_index)).write_text("{}")
    train(tiny(*ONE_STEP, REPLACE, "training.save_total_limit=1", "training.max_steps=2", output_dir=run))
    assert set(FOREIGN) <= names(run)
    assert not list(run.glob("out-of-memory*"))
    assert not list(run.glob("replaced-1*"))
    assert sorted(folder.name for folder in run.glob("checkpoint-?")) == ["checkpoint-2"]


IN_THE_RUN = (
    "model/notes.txt",
    "model/mine/config.json",
    "checkpoint-1/notes.txt",
    "logs/lowmem_ft/notes.txt",
)


@pytest.fixture
def run_with_own_files(run):
    """The same run with somebody's own files in the very folders that it made."""
    (run / "logs/lowmem_ft").mkdir()
    (run / "logs/lowmem_ft/events.out.tfevents.1").write_text("")
    for name in IN_THE_RUN:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("mine")
    return run


def test_own_files_in_the_folders_of_a_replaced_run_stay_where_they_are(tiny, run_with_own_files):
    run = run_with_own_files
    train(tiny(*ONE_STEP, REPLACE, "training.save_steps=2", "training.max_steps=2", output_dir=run))
    assert {*FOREIGN, *IN_THE_RUN} <= names(run)
    assert (run / "model" / "config.json").exists()
    assert not list(run.glob("replaced-1*"))
    assert [file.name for file in (run / "checkpoint-1").iterdir()] == ["notes.txt"]
    assert [file.name for file in (run / "logs/lowmem_ft").iterdir()] == ["notes.txt"]


def test_own_files_in_an_old_checkpoint_and_in_what_was_moved_aside_stay_too(
    tiny, run_with_own_files, monkeypatch, caplog
):
    run = run_with_own_files
    again = ("training.resume_from_checkpoint=auto", "training.max_steps=2", "training.save_total_limit=1")
    train(tiny(*ONE_STEP, *again, output_dir=run))
    assert set(IN_THE_RUN) <= names(run)
    assert [file.name for file in (run / "checkpoint-1").iterdir()] == ["notes.txt"]
    assert "checkpoint-1 is kept, because no run wrote notes.txt in it." in caplog.text
    (run / "checkpoint-1" / "notes.txt").unlink()
    (run / "checkpoint-1").rmdir()
    aside = run / "replaced-10"
    step = loop.Retries.train_step

    def with_notes(retries, window):
        (aside / "model" / "mine.txt").write_text("mine")
        return step(retries, window)

    monkeypatch.setattr(loop.Retries, "train_step", with_notes)
    train(tiny(*ONE_STEP, REPLACE, output_dir=run))
    assert names(aside) == {"model/mine.txt"}


def test_a_replaced_run_is_whole_if_the_new_one_fails(tiny, run, monkeypatch, caplog):
    before = names(run) - set(FOREIGN) - {".lock"}

    def broken(retries, window):
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(loop.Retries, "train_step", broken)
        with pytest.raises(RuntimeError, match="a bug"):
            train(tiny(*ONE_STEP, REPLACE, output_dir=run))
    aside = run / "replaced-10"
    assert names(aside) == before
    assert f"The previous contents of {run} are in {aside}, for you to restore." in caplog.text
    with pytest.raises(
        UserError, match=rf"holds another run.*\. \(The run that it replaced is in {aside}\.\)"
    ):
        RunFolder.open(tiny(*ONE_STEP, output_dir=run))
    train(tiny(*ONE_STEP, REPLACE, output_dir=run))  # whatever failed in between goes too
    assert set(FOREIGN) <= names(run)
    assert [folder.name for folder in run.glob("replaced-*")] == ["replaced-9"]


@pytest.mark.parametrize("name", ["model/config.json", "recipe.yaml", "checkpoint-4/trainer_state.json"])
@pytest.mark.parametrize("overwrite", ["true", "false"])
def test_what_no_run_wrote_is_not_written_over(tiny, tmp_path, name, overwrite):
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (tmp_path / "run" / name).write_text("mine")
    with pytest.raises(
        UserError, match=rf"holds {name.split('/')[0]}, which are not from a run of lowmem_ft"
    ):
        RunFolder.open(tiny(f"training.overwrite_output_dir={overwrite}", output_dir=tmp_path / "run"))


def test_a_run_does_not_replace_the_model_that_it_starts_from(tiny, run):
    with pytest.raises(UserError, match=r"would replace .*model, which model\.name_or_path reads"):
        RunFolder.open(tiny(REPLACE, f"model={run / 'model'}", output_dir=run))


def test_two_runs_do_not_share_a_folder(tiny, run):
    with FileLock(run / ".lock"), pytest.raises(UserError, match="of a run that is still active"):
        RunFolder.open(tiny(REPLACE, output_dir=run))
    RunFolder.open(tiny(REPLACE, output_dir=run))


def test_a_run_holds_its_folder_until_it_ends(tiny, tmp_path, monkeypatch):
    recipe, step = tiny(*ONE_STEP, output_dir=tmp_path / "run"), loop.Retries.train_step

    def second_run(retries, window):
        with pytest.raises(UserError, match="of a run that is still active"):
            RunFolder.open(tiny(*ONE_STEP, REPLACE, output_dir=tmp_path / "run"))
        return step(retries, window)

    monkeypatch.setattr(loop.Retries, "train_step", second_run)
    assert train(recipe).steps == 1
    RunFolder.open(tiny(*ONE_STEP, REPLACE, output_dir=tmp_path / "run"))
