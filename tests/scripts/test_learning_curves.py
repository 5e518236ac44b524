"""Learning curves: what a run keeps, what a later call does not repeat, and what the page says of the results."""

from __future__ import annotations

import dataclasses
import json
import shutil

import learning_curves
import pytest
import torch
from curves import page, runs
from curves.cpu_products import float32_products
from curves.runs import REFERENCE, RUNGS, Curve, planned, run_curve
from curves.tasks import definitions
from transformers import AutoConfig, AutoModelForCausalLM

from lowmem_ft.recipe import load_recipe


@pytest.fixture
def model(tmp_path, request):
    """The recipe tiny's model with weights, and a chat template as the demo's has one."""
    folder = tmp_path / "model"
    shutil.copytree(request.config.rootpath / "recipes" / "tiny", folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_is_a_recipe(rung):
    assert load_recipe("demo", RUNGS[rung]).optimizer.row.takes_state_formats


def test_a_run_keeps_its_losses_and_its_distance_from_float32(model, tmp_path):
    reference = Curve(task="demo", seed=0, rung=REFERENCE, steps=4)
    whole = run_curve(reference, model, tmp_path)
    assert [step for step, _ in whole["held_out"]] == [0, 1, 2, 3, 4]
    assert whole["distance"] is None
    coarse, other = (
        run_curve(dataclasses.replace(reference, **change), model, tmp_path)
        for change in ({"rung": "split24, 8bit state"}, {"seed": 1})
    )
    assert [step for step, _ in coarse["held_out"]] == [1, 2, 3, 4]
    assert coarse["tokens"] == whole["tokens"]
    assert 0 < coarse["distance"] < other["distance"]


def result(rung, seed, loss, task="demo", steps=60):
    return {
        "task": task,
        "seed": seed,
        "rung": rung,
        "steps": steps,
        "held_out": [[30, loss + 0.5], [60, loss]],
        "distance": None if (rung, seed) == (REFERENCE, 0) else 0.25,
        "date": "2026-01-01",
        "hardware": "a processor",
        "versions": {"torch": "2"},
    }


def test_what_is_kept_is_not_run_again_and_the_rest_in_order(monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "RESULTS", tmp_path / "results.json")
    monkeypatch.setenv("LOWMEM_FT_CACHE", str(tmp_path))
    monkeypatch.setattr(learning_curves, "get_demo_model", lambda cache: cache / "model")
    monkeypatch.setattr(learning_curves, "write_page", lambda results, steps: None)
    ran = []

    def run(curve, model, cache):
        ran.append(curve)
        runs.weights_file(cache, curve).touch()
        return result(curve.rung, curve.seed, 2.0, curve.task, curve.steps)

    monkeypatch.setattr(learning_curves, "run_curve", run)
    plan = planned(["demo", "definitions"], 2, 60)
    learning_curves.run_missing(plan[:7])
    learning_curves.run_missing(plan)
    assert ran == plan
    assert ran[0] == Curve(task="demo", seed=0, rung=REFERENCE, steps=60)
    learning_curves.run_missing(planned(["demo"], 1, 80)[:1])
    assert ran[len(plan) :] == [Curve(task="demo", seed=0, rung=REFERENCE, steps=80)]
    kept = json.loads((tmp_path / "results.json").read_text())
    assert [(row["task"], row["seed"], row["rung"]) for row in kept[: len(plan)]] == [
        (curve.task, curve.seed, curve.rung) for curve in plan
    ]


def test_a_rung_without_float32s_final_weights_has_them_made_again(monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "RESULTS", tmp_path / "results.json")
    monkeypatch.setenv("LOWMEM_FT_CACHE", str(tmp_path))
    monkeypatch.setattr(learning_curves, "get_demo_model", lambda cache: cache / "model")
    monkeypatch.setattr(learning_curves, "write_page", lambda results, steps: None)
    runs.keep_result(result(REFERENCE, 0, 2.0))
    ran = []

    def run(curve, model, cache):
        ran.append(curve.rung)
        return result(curve.rung, curve.seed, 2.0)

    monkeypatch.setattr(learning_curves, "run_curve", run)
    learning_curves.run_missing(planned(["demo"], 1, 60)[:2])
    assert ran == [REFERENCE, "split16"]


@pytest.mark.parametrize("options", [["--seeds", "0"], ["--seeds", "-1"], ["--steps", "0"], ["--steps", "6"]])
def test_numbers_that_make_no_runs_are_refused(options, capsys):
    with pytest.raises(SystemExit, match="2"):
        learning_curves.main([*options, "--page-only"])
    assert f"{options[0]} must be" in capsys.readouterr().err


def test_the_page_is_that_of_the_kept_results():
    results = runs.read_results()
    assert results
    assert page.PAGE.read_text("utf-8") == page.page_of(results, runs.NUM_STEPS)
    assert page.PICTURE.read_text("utf-8") == page.picture_of(results, runs.NUM_STEPS)


def test_products_of_bfloat16_are_those_of_float32_rounded_once():
    left, right = torch.randn(5, 70).bfloat16(), torch.randn(70, 3).bfloat16()
    whole = torch.randn(5, 70), torch.randn(70, 3)
    before = whole[0] @ whole[1]
    with float32_products():
        assert torch.equal(left @ right, (left.float() @ right.float()).bfloat16())
        assert torch.equal(left[None] @ right[None], (left.float() @ right.float()).bfloat16()[None])
        assert torch.equal(whole[0] @ whole[1], before)
        total = torch.randn(5, 3).bfloat16()
        added = torch.addmm(total.float(), left.float(), right.float(), beta=0.5, alpha=2.0)
        assert torch.equal(total.addmm_(left, right, beta=0.5, alpha=2.0), added.bfloat16())
        assert torch.equal(total, added.bfloat16())
    assert torch.equal(whole[0] @ whole[1], before)


def test_definitions_are_of_single_words_and_without_examples():
    data = (
        "  1 This is the licence.\n"
        '0001 03 n 02 dog 0 domestic_dog 0 001 @ 0002 n 0000 | a common animal; "the dog barked"\n'
        "0002 03 n 01 Paris 0 000 | a city\n"
        "0003 03 n 01 hot_dog 0 000 | a food\n"
        f"0004 03 n 01 long 0 000 | {'x' * 81}\n"
    )
    assert list(definitions(data)) == [("dog", "a common animal")]
