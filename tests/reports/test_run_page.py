from __future__ import annotations

import dataclasses
import json

import pytest
from drawings import Page

from lowmem_ft.foundation.memory.comparison import compared
from lowmem_ft.monitoring.profiling.step_profile import ProfileRow, StepProfile
from lowmem_ft.recipe import load_recipe
from lowmem_ft.reports.run_page import run_page
from lowmem_ft.reports.run_record import RunRecord
from lowmem_ft.training.folder.generations_file import Generation

NASTY = '</pre></script><script>alert("&")</script><b>'
PEAKS = {
    "peak_bytes": 2**30,
    "host_peak_bytes": 2**29,
    "reserved_bytes": None,
    "by_phase": {"load": 2**28, "step": 2**30},
    "by_category": {"parameter": 2**20},
    "step_seconds": None,
}


@pytest.fixture
def run(tmp_path):
    metrics = [
        {"step": 0, "estimated": {**PEAKS, "peak_bytes": 3 * 2**29}},
        {"step": 1, "loss": 2.5, "tokens": 10, "tokens_per_second": 5.0, "memory_peak_bytes": 2**30},
        {"step": 2, "loss": 1.25, "tokens": 20, "tokens_per_second": 6.0, "memory_peak_bytes": 2**30},
        {"step": 2, "eval_loss": 1.5, f"eval_loss_{NASTY}": 1.75},
        {"step": 2, "measured": PEAKS, "seconds": 7.0, "device": "cpu", "num_processes": 1},
    ]
    return RunRecord(
        path=tmp_path / "<i>run</i>",
        recipe=load_recipe("tiny", [f"training.run_name='{NASTY}'"]),
        metrics=metrics,
        is_finished=True,
        answers=[
            Generation(step=step, index=0, prompt=NASTY, answer=text)
            for step, text in ((0, "Paris"), (2, NASTY))
        ],
        profile=StepProfile(
            steps=(1, 2),
            num_steps=2,
            step_seconds=0.5,
            device="cpu",
            busy_seconds=0.0,
            rows=(ProfileRow(part="forward", module=NASTY, operator="mm", calls=1, host_seconds=0.5),),
            classes={NASTY: NASTY},
            advice=(NASTY,),
        ),
    )


def test_texts_of_others_stay_texts(run, played):
    page = Page(
        run_page(run, dataclasses.replace(played, model=dataclasses.replace(played.model, name=NASTY)))
    )
    page.check_loads_nothing()
    assert not {"b", "i"} & {tag for tag, _ in page.tags}
    assert [tag for tag, _ in page.tags].count("script") == 2  # the figure's data, and what shows them
    for where in ("Answers before and after", "Where the time of a step went", "Settings"):
        assert NASTY in page.text[page.text.index(where) :]


def test_numbers_are_those_of_the_json(run, played):
    page, values = Page(run_page(run, played)), json.loads(json.dumps(run.to_json()))
    for row in compared(run.estimated, run.measured):
        assert row.name in page.text
    assert "peak of the process1.50 GiB1.00 GiB+50.0%" in page.text
    assert values["errors"]["peak of the process"] == 0.5
    assert f"loss{values['loss']:.4f}" in page.text
    assert f"held-out loss{values['eval_loss']:.4f}" in page.text
    assert f"held-out, {NASTY}" in page.text


def test_the_timeline_is_that_of_the_estimate(run, played):
    page = Page(run_page(run, played))
    widths = [float(attributes["width"]) for tag, attributes in page.tags if tag == "svg"]
    assert widths == [390, 390, 390, 390, 960]  # loss, memory, speed; the step for a phone and for a screen
    figure = page.text[page.text.index('"layers"') :]
    assert str(played.by_category_at_peak["optimizer_state"]) in figure


def test_the_commands_repeat_the_run(run):
    text = Page(run_page(run, "")).text
    assert f"lowmem-ft train 'recipe={run.path}/recipe.yaml' 'training.output_dir={run.path}-again'" in text


def test_an_unfinished_run_has_a_page(run):
    bare = dataclasses.replace(run, metrics=[], is_finished=False, answers=(), profile=None)
    page = Page(run_page(bare, "Nothing was measured."))
    page.check_loads_nothing()
    assert "unfinished" in page.text
    assert "Losses" not in page.text
