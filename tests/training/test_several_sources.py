"""A run over several sources: resumed bit for bit, evaluated by source, and stopped by rows that have changed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lowmem_ft.foundation.errors import CheckpointError, Interrupted
from lowmem_ft.recipe import recipe_to_yaml
from lowmem_ft.training.folder.changed_recipe import refuse_to_continue_another
from lowmem_ft.training.folder.run_folder import RunFolder
from lowmem_ft.training.run.loop import train

AUTO = "training.resume_from_checkpoint=auto"


@pytest.fixture
def files(tmp_path, recipes_folder):
    """The tiny recipe's chats in two files, of 40 and of 24."""
    lines = (recipes_folder / "tiny" / "data.jsonl").read_text().splitlines(keepends=True)
    few, many = tmp_path / "few.jsonl", tmp_path / "many.jsonl"
    many.write_text("".join(lines[:40]))
    few.write_text("".join(lines[40:]))
    return many, few


def records(run: Path, key: str):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if key in line]


WRITE_METRICS = RunFolder.write_metrics


def killed_at_step_3(folder, record):
    WRITE_METRICS(folder, record)
    if record["step"] == 3 and "loss" in record:
        os.kill(os.getpid(), signal.SIGTERM)


SHORT = (
    "training.max_steps=4",
    "training.save_steps=2",
    "training.eval_steps=null",
    "training.logging_steps=1",
)


@pytest.mark.parametrize(
    "keys,settings",
    [
        pytest.param(("", "repeats: 2"), ("data.group_by_length=true",), marks=pytest.mark.slow),
        (("weight: 1", "weight: 2"), ("data.packing=true",)),
        pytest.param(
            ("weight: 1", "weight: 2"),
            ("data.streaming=true", "data.eval_size=null", "data.shuffle_buffer_size=8"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda given: " ".join(given),
)
def test_a_run_over_two_sources_resumes_bit_for_bit(
    tiny, metrics, files, tmp_path, monkeypatch, keys, settings
):
    sources = ", ".join(f"{{path: {file}{key and ', '}{key}}}" for file, key in zip(files, keys, strict=True))
    arguments = (f"data.sources=[{sources}]", *SHORT, *settings)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(tiny(*arguments, output_dir=whole))
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_metrics", killed_at_step_3)
        with pytest.raises(Interrupted):
            train(tiny(*arguments, output_dir=stopped))
    train(tiny(*arguments, AUTO, output_dir=stopped))
    for key in ("loss", "grad_norm", "tokens"):
        assert metrics(stopped, key) == metrics(whole, key)
    one, other = (load_file(run / "model" / "model.safetensors") for run in (whole, stopped))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_held_out_losses_and_shares_of_each_source_are_kept(tiny, files, tmp_path, caplog):
    caplog.set_level("INFO")
    run = tmp_path / "run"
    result = train(
        tiny(f"data={files[0]},{files[1]}", "training.max_steps=2", "data.eval_size=4", output_dir=run)
    )
    (evaluated,) = records(run, "eval_loss")
    by_source = {name: evaluated[f"eval_loss_{name}"] for name in ("many", "few")}
    assert by_source == result.evaluation.by_source
    assert min(by_source.values()) < evaluated["eval_loss"] < max(by_source.values())
    assert f", many {by_source['many']:.4f}, few {by_source['few']:.4f}" in caplog.text
    (written,) = records(run, "sources")
    assert [(one["name"], one["examples"]) for one in written["sources"]] == [("many", 36), ("few", 20)]
    assert sum(one["share"] for one in written["sources"]) == pytest.approx(1, abs=1e-5)


def swap_first_rows(file: Path) -> None:
    """Edit a file so that its tokens are as many as before."""
    first, second, *rest = file.read_text().splitlines(keepends=True)
    file.write_text("".join([second, first, *rest]))


@pytest.mark.parametrize("streaming", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rows_edited_at_the_same_path_end_a_resumed_run_unless_it_consents(
    tiny, files, tmp_path, metrics, caplog, streaming
):
    source = (f"data={files[0]}", f"data.streaming={streaming}", "data.eval_size=null")
    run, settings = tmp_path / "run", (*source, *SHORT)
    train(tiny(*settings, output_dir=run))
    more = (*settings, "training.max_steps=5", AUTO)
    (files[0].parent / "moved.jsonl").write_bytes(files[0].read_bytes())
    swap_first_rows(files[0])
    with pytest.raises(
        CheckpointError, match=r"written with other rows: .*training\.resume_with_other_data=true"
    ):
        train(tiny(*more, output_dir=run))
    train(tiny(*more, f"data={files[0].parent / 'moved.jsonl'}", output_dir=run))
    assert len(metrics(run)) == 5
    caplog.clear()
    train(tiny(*more, "training.max_steps=6", "training.resume_with_other_data=true", output_dir=run))
    assert "Resuming with other data" in caplog.text
    assert len(metrics(run)) == 6
    train(tiny(*more, "training.max_steps=7", output_dir=run))


def test_sources_may_move_and_their_shares_may_not_change(tiny, tmp_path):
    def with_weight(file, weight):
        return tiny(f"data.sources=[{{path: {file}, weight: 1}}, {{path: b, weight: {weight}}}]")

    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(with_weight("a", 2)))
    with pytest.raises(CheckpointError, match=r"data\.sources was .*Change these settings back"):
        refuse_to_continue_another(with_weight("elsewhere", 3), tmp_path)
    refuse_to_continue_another(with_weight("elsewhere", 2), tmp_path)
