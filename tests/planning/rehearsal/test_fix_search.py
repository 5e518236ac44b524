"""Where a rehearsed run does not fit: the smallest change of settings with which it does, rehearsed."""

from __future__ import annotations

import dataclasses
import json

import pytest
from gpu_runs import budget_of_one_mib
from rich.console import Console

from lowmem_ft.cli import main
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.planning.estimator import changes, estimate_memory
from lowmem_ft.planning.planner.outlook import outlook_for
from lowmem_ft.planning.rehearsal.fix_search import FixSearch
from lowmem_ft.recipe import load_recipe
from lowmem_ft.recipe.space.search_space import ROWS
from lowmem_ft.reports.rehearsal_table import fixes_table

LARGE = (
    *("data.eval_size=null", "training.eval_steps=null", "data.max_length=256"),
    *("training.gradient_accumulation_steps=1", "training.per_device_train_batch_size=64"),
    *("loss.chunk_tokens=null", "checkpointing.mode=none"),
)
LEAN = (
    *("training.per_device_train_batch_size=1", "checkpointing.mode=full", "loss.chunk_tokens=32"),
    *("model.dtype=bfloat16", "optimizer.name=paged_adamw_8bit"),
)
"""Leaves hardly a change to estimate."""


@pytest.fixture
def settings(tmp_path, chats):
    """Of the command, for a step that takes some hundred MiB."""
    return ["recipe=tiny", f"data={chats([160] * 64)}", f"training.output_dir={tmp_path / 'run'}", *LARGE]


def test_the_command_prints_a_change_with_which_the_same_command_fits(
    settings, capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    wanted = [*settings, "budget=700MiB", "--gpu", "rtx-4090", "--steps", "1"]
    assert main(["rehearse", *wanted, "--json", str(tmp_path / "found.json"), "--changes"]) == 3
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if str(tmp_path) not in line]  # paths are never broken
    assert max(map(len, lines)) <= 80
    (mend,) = json.loads((tmp_path / "found.json").read_text())["mends"]
    assert mend["fits"]
    lines = said.splitlines()
    title = lines.index("With this change it fits, and the results of training are the same:")
    printed = [line.strip() for line in lines[title + 1 : title + 1 + len(mend["overrides"])]]
    assert printed == mend["overrides"] != []
    assert main(["rehearse", *wanted, *printed]) == 0


def test_no_search_is_made_for_a_program_that_has_not_asked(small_settings, tmp_path, capsys):
    budget = budget_of_one_mib(find_gpu("rtx-4090"))
    settings = [f"training.output_dir={tmp_path / 'run'}", f"budget={budget}", *small_settings]
    wanted = ["recipe=tiny", *settings, "--gpu", "rtx-4090", "--steps", "1"]
    assert main(["rehearse", *wanted, "--json", "-"]) == 3
    assert "mends" not in json.loads(capsys.readouterr().out)


def test_where_nothing_mends_it_what_is_missing_is_said(small_settings, tmp_path, capsys):
    settings = [f"training.output_dir={tmp_path / 'run'}", *small_settings[:3], *LEAN, "budget=428MiB"]
    assert main(["rehearse", "recipe=tiny", *settings, "--gpu", "rtx-4090", "--steps", "1"]) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "No change makes it fit on rtx-4090. All of them together still need" in said
    assert "With this change" not in said


def test_changes_are_for_rows_as_long_as_the_data_has_them(rehearse, kept, chats, recipe, monkeypatch):
    """Of 256 tokens at the most, the longest has some 30. Only fewer rows are tried, of all changes."""
    offered = changes.remediations_for

    def fewer_rows(*arguments, **options):
        return [way for way in offered(*arguments, **options) if way.settings.keys() <= {*ROWS}]

    monkeypatch.setattr(changes, "remediations_for", fewer_rows)
    wanted = recipe(f"data={chats([9] * 64)}", *LARGE, "training.max_steps=1")
    needs = rehearse(wanted, "rtx-4090").estimate.process_high_bytes
    small = dataclasses.replace(find_gpu("rtx-4090"), memory_bytes=needs - 2**23, held_by_others_bytes=0)
    found = rehearse(wanted, small)
    assert not found.fits
    mend = next(iter(FixSearch(found, kept=kept)))
    assert mend.rehearsal.fits
    mended = mend.change.way.applied_to(wanted)
    rows = dataclasses.replace(mended.data, max_length=found.longest.shape.length)
    estimate = estimate_memory(dataclasses.replace(mended, data=rows), small)
    assert mend.change.estimate.allocated_peak_bytes == estimate.allocated_peak_bytes
    assert mend.rehearsal.longest.peak_bytes <= estimate.allocated_peak_bytes


def test_a_change_that_fails_when_rehearsed_is_not_offered(rehearse, kept, settings, monkeypatch):
    found = rehearse(load_recipe("tiny", [*settings[1:], "budget=700MiB"]), "rtx-4090", steps=1)
    monkeypatch.setattr(
        "lowmem_ft.planning.rehearsal.fix_search.rehearse", lambda *arguments, **options: found
    )
    mending = FixSearch(found, kept=kept, outlook_of=outlook_for)
    tried = [next(iter(mending))]
    console = Console(width=80)
    with console.capture() as capture:
        console.print(fixes_table(tried, mending.all_together, "rtx-4090", complete=True))
    said = " ".join(capture.get().split())
    assert "it fits by the estimate, but not when rehearsed." in said
    assert "With this change" not in said
