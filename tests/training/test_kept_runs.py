"""Runs that earlier versions saved still load, recipe and checkpoint, and train on as they would have then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.run.loop import train

KEPT = Path(__file__).parents[1] / "data" / "kept_runs"
RUNS = sorted(path.parent for path in KEPT.glob("*/*/recipe.yaml"))

# Other processors sum products of bfloat16 in another order. An optimizer that lost its state is further off.
RELATIVE_TOLERANCE = 2e-4


def name_of(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


def kept_losses(folder: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def test_there_are_runs_to_load():
    assert {run.name for run in RUNS} == {"lora", "rung-8"}


@pytest.mark.parametrize("kept", RUNS, ids=name_of)
def test_a_kept_run_goes_on_from_its_checkpoint(kept, tmp_path):
    folder = shutil.copytree(kept, tmp_path / "run")
    settings = [f"model={KEPT / 'model'}", f"data={KEPT / 'data.jsonl'}", f"training.output_dir={folder}"]
    recipe = load_recipe(folder / "recipe.yaml", [*settings, "training.resume_from_checkpoint=auto"])
    train(recipe)
    then, now = kept_losses(kept), kept_losses(folder)
    assert now.keys() == then.keys() == {1, 2, 3, 4, 5}
    assert now == pytest.approx(then, rel=RELATIVE_TOLERANCE)
