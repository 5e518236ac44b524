"""Resuming with something changed: what holds from then on, what is refused, what is never lost."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
from pathlib import Path

import pytest

from lowmem_ft.foundation.errors import CheckpointError, UserError
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.folder.run_folder import RunFolder
from lowmem_ft.training.run.loop import train

SHORT = ("training.max_steps=6", "training.save_steps=2", "training.eval_steps=null")
AUTO = "training.resume_from_checkpoint=auto"


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """The folder of a run of SHORT that has finished, and what it returned."""
    folder = tmp_path_factory.mktemp("once") / "run"
    place = (f"training.output_dir={folder}", "training.use_cpu=true")
    return folder, train(load_recipe("tiny", [*place, *SHORT]))


@pytest.fixture
def finished(once, tmp_path):
    """A copy of that run, in a folder of the test's own."""
    return shutil.copytree(once[0], tmp_path / "run")


def checkpoints(run):
    return sorted(path.name for path in run.glob("checkpoint-*"))


def test_a_run_stopped_before_its_first_checkpoint_begins_again(tiny, metrics, finished):
    run = finished
    losses = metrics(run)
    for leftover in (*run.glob("checkpoint-*"), run / "model"):
        shutil.rmtree(leftover)
    train(tiny(*SHORT, AUTO, output_dir=run))
    assert metrics(run) == losses


def test_auto_says_in_one_sentence_that_a_finished_run_has_no_checkpoint(tiny, tmp_path, caplog):
    run = tmp_path / "run"
    train(tiny("training.max_steps=2", "training.save_steps=null", output_dir=run))
    caplog.set_level("INFO")
    caplog.clear()
    for settings in ((), ("training.max_steps=3",), ("training.seed=7",)):
        with pytest.raises(UserError, match=r"holds a finished run \(.*overwrite_output_dir=true") as refused:
            RunFolder.open(tiny("training.max_steps=2", *settings, AUTO, output_dir=run))
        assert len(refused.value.problems) == 1
    assert "Starting from the beginning" not in caplog.text
    assert "Resuming" not in caplog.text


def test_a_run_that_would_end_before_its_checkpoint_is_not_said_to_go_on(tiny, finished, caplog):
    run = finished
    caplog.clear()
    with pytest.raises(CheckpointError, match="is at step 6, but the recipe ends at step 3"):
        RunFolder.open(tiny(*SHORT, "training.max_steps=3", AUTO, output_dir=run))
    assert "Resuming" not in caplog.text


def records(run: Path) -> list[str]:
    """The lines of a run's metrics, but for what it took this time."""
    return [line for line in (run / "metrics.jsonl").read_text().splitlines() if "measured" not in line]


def test_a_finished_run_ends_as_it_did(tiny, once, finished, caplog):
    run, (_, first) = finished, once
    before = records(run)
    caplog.set_level("INFO")
    again = train(tiny(*SHORT, AUTO, output_dir=run))
    assert "1 process: no step is left of 6." in caplog.text
    assert (again.steps, again.loss, again.evaluation) == (first.steps, first.loss, first.evaluation)
    assert records(run) == before
    assert "training loss of the last step" in (run / "model" / "README.md").read_text()


def test_more_steps_follow_the_longer_schedule(tiny, metrics, finished, tmp_path, caplog):
    run, whole = finished, tmp_path / "whole"
    train(tiny(*SHORT, "training.max_steps=9", AUTO, output_dir=run))
    assert "training.max_steps was 6, is 9" in caplog.text
    train(tiny(*SHORT, "training.max_steps=9", output_dir=whole))
    assert metrics(run, "learning_rate")[6:] == metrics(whole, "learning_rate")[6:]


def test_another_learning_rate_holds_from_the_next_step_on(tiny, metrics, tmp_path):
    run = tmp_path / "run"
    constant = (*SHORT, "training.lr_scheduler_type=constant")
    train(tiny(*constant, "training.max_steps=2", output_dir=run))
    train(tiny(*constant, "training.learning_rate=1e-3", AUTO, output_dir=run))
    assert metrics(run, "learning_rate") == [1e-2] * 2 + [1e-3] * 4


@pytest.mark.parametrize("batch_size,steps", [(4, 7 + 7), (2, 7 + 14), (1, 7 + 28)])
def test_another_batch_size_ends_after_the_same_epochs(tiny, tmp_path, batch_size, steps):
    """56 examples, 8 a step: 7 steps an epoch."""
    run = tmp_path / "run"
    shared = ("training.eval_steps=null", "training.save_steps=7")
    train(tiny(*shared, "training.max_steps=7", output_dir=run))
    smaller = f"training.per_device_train_batch_size={batch_size}"
    result = train(tiny(*shared, "training.num_train_epochs=2", smaller, AUTO, output_dir=run))
    assert result.steps == steps
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in records if "loss" in record][-1] == 2


@pytest.mark.parametrize("change", ["optimizer.weight_decay=0.1", "data.eval_size=4", "data.shuffle=false"])
def test_what_decides_data_and_optimizer_cannot_change(tiny, finished, change):
    run = finished
    with pytest.raises(CheckpointError, match=change.split("=")[0]):
        RunFolder.open(tiny(*SHORT, change, AUTO, output_dir=run))


def test_going_back_in_the_same_folder_must_be_asked_for(tiny, metrics, tmp_path):
    run = tmp_path / "run"
    train(tiny(*SHORT, "training.save_total_limit=null", output_dir=run))
    losses = metrics(run)
    back = (*SHORT, f"training.resume_from_checkpoint={run / 'checkpoint-2'}")
    with pytest.raises(
        UserError, match=r"not the newest of its run, which is checkpoint-6.*overwrite_output_dir"
    ):
        train(tiny(*back, output_dir=run))
    assert checkpoints(run) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    train(tiny(*back, "training.overwrite_output_dir=true", output_dir=run))
    assert metrics(run) == losses


def test_a_checkpoint_can_go_on_in_a_new_folder_but_not_in_that_of_another_run(
    tiny, metrics, finished, tmp_path
):
    run, branch = finished, tmp_path / "branch"
    back = (*SHORT, f"training.resume_from_checkpoint={run / 'checkpoint-4'}")
    train(tiny(*back, output_dir=branch))
    assert metrics(branch) == metrics(run)[4:]
    with pytest.raises(UserError, match="holds another run"):
        train(tiny(*back, output_dir=branch))
    train(tiny(*back, "training.overwrite_output_dir=true", output_dir=branch))
    assert metrics(branch, "step") == [5, 6]


def test_a_damaged_newer_checkpoint_costs_no_good_one(tiny, finished):
    run = finished
    (run / "checkpoint-6" / "config.json").unlink()
    limit = ("training.save_steps=1", "training.save_total_limit=1", "training.max_steps=5")
    train(tiny(*SHORT, *limit, AUTO, output_dir=run))
    assert checkpoints(run) == ["checkpoint-5", "checkpoint-6"]
    assert RunFolder.open(tiny(*SHORT, AUTO, output_dir=run)).resume_from == run / "checkpoint-5"


def test_metrics_that_cannot_be_read_name_the_line(tiny, finished):
    run = finished
    file = run / "metrics.jsonl"
    file.write_text("not json\n" + file.read_text())
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl, line 1 is not a JSON object: 'not json'"):
        train(tiny(*SHORT, AUTO, output_dir=run))
    assert file.read_text().startswith("not json")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
def test_a_full_disk_at_a_line_of_metrics_is_said(tiny, tmp_path):
    folder = RunFolder(tmp_path, resume_from=None, overwrite=False)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl cannot be written.*No space left"):
        folder.write_metrics({"step": 1})


def test_a_full_disk_at_the_finished_model_leaves_the_checkpoints(tiny, tmp_path):
    run = tmp_path / "run"
    shared = ("training.max_steps=2", "training.save_steps=2", "training.eval_steps=null")
    train(tiny(*shared, output_dir=run))
    shutil.rmtree(run / "model")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"model cannot be written.*auto"):
            train(tiny(*shared, AUTO, output_dir=run))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-2", "metrics.jsonl", "recipe.yaml"]
    assert train(tiny(*shared, AUTO, output_dir=run)).model_folder.exists()


def test_an_evaluation_from_before_the_checkpoint_is_not_made_again(tiny, tmp_path):
    run = tmp_path / "run"
    train(tiny(*SHORT, "training.eval_steps=2", output_dir=run))
    shutil.rmtree(run / "checkpoint-6")
    train(tiny(*SHORT, "training.eval_steps=2", AUTO, output_dir=run))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "eval_loss" in record] == [2, 4, 6]


def test_a_run_goes_on_after_its_model_and_data_have_moved(tiny, metrics, tmp_path, recipes_folder):
    before, after, run, whole = (tmp_path / name for name in ("before", "after", "run", "whole"))
    shutil.copytree(recipes_folder / "tiny", before)
    shutil.copytree(recipes_folder / "tiny", after)

    def at(folder):
        return f"model={folder}", f"data={folder / 'data.jsonl'}"

    train(tiny(*SHORT, *at(before), output_dir=whole))
    train(
        tiny(
            *SHORT, "training.max_steps=4", "training.lr_scheduler_type=constant", *at(before), output_dir=run
        )
    )
    shutil.rmtree(before)
    (after / "config.json").unlink()  # model and tokenizer come from the checkpoint
    train(tiny(*SHORT, "training.lr_scheduler_type=constant", *at(after), AUTO, output_dir=run))
    assert metrics(run, "tokens") == metrics(whole, "tokens")
    assert (run / "model" / "tokenizer.json").exists()


def test_other_data_is_noticed_by_its_size(tiny, tmp_path, recipes_folder):
    run, other = tmp_path / "run", tmp_path / "other.jsonl"
    train(tiny(*SHORT, "training.max_steps=2", output_dir=run))
    lines = (recipes_folder / "tiny" / "data.jsonl").read_text().splitlines()
    other.write_text("\n".join(lines[:-8]))
    with pytest.raises(CheckpointError, match=r"was written with training data of \d+ tokens.* now has \d+"):
        train(tiny(*SHORT, f"data={other}", AUTO, output_dir=run))


EXACT_FORMATS = ["optimizer.master=fp32", "optimizer.master=split16"]


@pytest.mark.parametrize("first,second", [EXACT_FORMATS, EXACT_FORMATS[::-1]])
def test_a_run_goes_on_in_another_exact_format_bit_for_bit(tiny, metrics, tmp_path, caplog, first, second):
    bfloat16 = (*SHORT, "model.dtype=bfloat16", "training.lr_scheduler_type=constant")
    straight, changed = tmp_path / "straight", tmp_path / "changed"
    train(tiny(*bfloat16, first, output_dir=straight))
    train(tiny(*bfloat16, first, "training.max_steps=4", output_dir=changed))
    train(tiny(*bfloat16, second, AUTO, output_dir=changed))
    assert "optimizer.master was" in caplog.text
    assert metrics(changed) == metrics(straight)


@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_float32_weights_go_on_as_bfloat16_with_their_lower_halves_and_compact_state(
    tiny, finished, caplog, state
):
    shutil.rmtree(finished / "checkpoint-6")
    recipe = tiny(
        *SHORT,
        AUTO,
        "model.dtype=bfloat16",
        "optimizer.master=split16",
        f"optimizer.state={state}",
        output_dir=finished,
    )
    assert math.isfinite(train(recipe).loss)
    assert "its master begins from that" not in caplog.text  # it began from the float32 weights of the file
