"""``plan.mode=auto``: the memory knobs are chosen before a run, once."""

from __future__ import annotations

import dataclasses
import logging

import pytest

import lowmem_ft
from lowmem_ft import estimate_memory, load_recipe
from lowmem_ft.cli import main
from lowmem_ft.foundation.errors import DoesNotFitError, UserError
from lowmem_ft.foundation.system import child_process
from lowmem_ft.foundation.units import GIB
from lowmem_ft.planning.planner import MemoryPlan
from lowmem_ft.planning.preflight import plan_first
from lowmem_ft.planning.preflight.plan_first import with_plan
from lowmem_ft.training.folder.run_folder import RunFolder

CHOSEN = {"optimizer.state": "8bit", "checkpointing.mode": "none"}
SHORT = (
    "training.max_steps=4",
    "training.save_steps=2",
    "training.eval_steps=null",
    "budget.preflight=false",
)


@pytest.fixture
def tiny(tmp_path):
    def load(*settings):
        folder = f"training.output_dir={tmp_path / 'run'}"
        return load_recipe("tiny", [folder, "training.use_cpu=true", "plan.mode=auto", *SHORT, *settings])

    return load


@pytest.fixture(scope="module")
def estimate():
    return estimate_memory(load_recipe("tiny"), "cpu")


@pytest.fixture
def searches(monkeypatch, estimate):
    """The recipes that were searched for; each search finds the same."""
    asked = []

    def search(recipe, gpu):
        asked.append((recipe, gpu))
        found = plan_first.with_settings(recipe, CHOSEN)
        found = dataclasses.replace(
            found, plan=dataclasses.replace(recipe.plan, mode="none"), budget=lowmem_ft.Budget(host="3GiB")
        )
        return MemoryPlan(recipe=found, estimate=estimate, fits=True, overrides=CHOSEN, seconds=3.0)

    monkeypatch.setattr(plan_first, "_searched", search)
    return asked


def test_the_plan_is_what_is_trained_and_what_stands_in_the_run(tiny, tmp_path, searches, caplog):
    with caplog.at_level(logging.INFO):
        lowmem_ft.train(tiny())
    saved = load_recipe(str(tmp_path / "run" / "recipe.yaml"))
    assert (saved.optimizer.state, saved.checkpointing.mode, saved.plan.mode) == ("8bit", "none", "none")
    assert saved.budget.host is None, "what the machine had free is no promise of the recipe"
    assert [gpu for _, gpu in searches] == ["cpu"]
    assert "optimizer.state=8bit checkpointing.mode=none" in caplog.text


def test_a_run_that_goes_on_keeps_its_plan(tiny, tmp_path, searches, monkeypatch):
    lowmem_ft.train(tiny())
    monkeypatch.setitem(CHOSEN, "checkpointing.mode", "full")
    result = lowmem_ft.train(
        tiny(
            "training.max_steps=6",
            "training.resume_from_checkpoint=auto",
            "tiling.mlp=2",
            "optimizer.state=bf16",
            "plan.keep=[tiling]",
        )
    )
    assert result.steps == 6
    assert len(searches) == 1
    saved = load_recipe(str(tmp_path / "run" / "recipe.yaml"))
    assert (saved.optimizer.state, saved.checkpointing.mode) == ("8bit", "none")
    assert saved.tiling.mlp == 2, "plan.keep says so"


def test_a_planned_run_is_written_to_the_folder_that_it_is_given_and_resumed_from_there(
    tiny, tmp_path, searches
):
    folder = RunFolder(tmp_path / "elsewhere", resume_from=None, overwrite=False)
    result = lowmem_ft.train(tiny(), folder)
    assert result.output_dir == folder.path
    assert not (tmp_path / "run").exists()
    resumed = RunFolder(folder.path, resume_from=folder.path / "checkpoint-4", overwrite=False)
    assert lowmem_ft.train(tiny("training.max_steps=5"), resumed).steps == 5
    assert len(searches) == 1, "a resumed run keeps its plan"


def test_a_folder_in_the_way_is_told_before_the_search(tiny, tmp_path, searches):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("somebody's own")
    with pytest.raises(UserError, match=r"recipe\.yaml, which are not from a run"):
        with_plan(tiny())
    assert searches == []


def test_where_nothing_fits_it_says_what_is_missing(tiny, tmp_path, monkeypatch, estimate):
    nearest = MemoryPlan(
        recipe=tiny(),
        estimate=estimate,
        fits=False,
        overrides=CHOSEN,
        missing_device_bytes=2 * GIB,
        smallest_gpu="l4",
    )
    monkeypatch.setattr(plan_first, "_searched", lambda *_: nearest)
    with pytest.raises(DoesNotFitError) as refused:
        lowmem_ft.train(tiny())
    assert "optimizer.state=8bit checkpointing.mode=none, lacks 2.00 GiB of device memory." in str(
        refused.value
    )
    assert "smallest GPU that would do is l4" in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_several_processes_are_planned_for_beforehand(tiny, monkeypatch, searches):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        UserError, match=r"makes a plan for one process, got 2\. Plan first, with `lowmem-ft plan"
    ):
        with_plan(tiny())


def test_a_model_data_and_a_budget_need_no_recipe(monkeypatch, tmp_path):
    seen = []

    def train(recipe, folder):
        seen.append(recipe)
        raise UserError("The recipe is all that is looked at.")

    monkeypatch.setattr(lowmem_ft.planning.preflight.train, "train", train)
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a"}\n')
    model = load_recipe("tiny").model.name_or_path
    assert main(["train", f"model={model}", f"data={data}", "budget=24GiB", "model.weights=random"]) == 2
    (recipe,) = seen
    assert (recipe.plan.mode, recipe.budget.device) == ("auto", "24GiB")
    assert recipe.training.gradient_accumulation_steps == 16
    assert recipe.name == "tiny-24GiB"  # its run folder: the next model's, or budget's, is another


@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_less_than_that_is_refused(capsys, left_out):
    settings = ["model=a/b", "data=some.jsonl", "budget=24GiB"]
    del settings[left_out]
    assert main(["train", *settings]) == 2
    assert "or model=X data=X budget=X to plan for; got" in capsys.readouterr().err


def test_a_search_that_dies_is_told_of_without_a_traceback(tiny, monkeypatch):
    monkeypatch.setattr(child_process, "_PROGRAM", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(UserError, match="failed: it ended with exit code -9"):
        with_plan(tiny())


@pytest.mark.slow
@pytest.mark.parametrize(
    "left_open, checkpointing",
    [
        ("plan.mode", "full"),  # the recipe's own: without a clock the least change that fits
        ("checkpointing.mode", "none"),
    ],
)
def test_the_search_is_made_elsewhere_and_what_it_finds_trains(tiny, tmp_path, left_open, checkpointing):
    settings = ("plan.mode=none", f"{left_open}=auto", "budget.device=2GiB", "training.max_steps=1")
    result = lowmem_ft.train(tiny(*settings))
    assert result.steps == 1
    saved = load_recipe(str(tmp_path / "run" / "recipe.yaml"))
    assert (saved.plan.mode, saved.checkpointing.mode) == ("none", checkpointing)
