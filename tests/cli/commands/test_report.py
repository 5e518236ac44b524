"""``lowmem-ft report`` shows runs side by side."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
from drawings import Page
from rich.console import Console

from lowmem_ft.cli import COMMANDS, main
from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.recipe import load_recipe
from lowmem_ft.reports.next_steps import next_steps
from lowmem_ft.reports.run_record import RunRecord

PEAKS = {
    "peak_bytes": 10 * 2**30,
    "host_peak_bytes": 2**30,
    "reserved_bytes": 11 * 2**30,
    "by_phase": {"load": 5 * 2**30, "step": 10 * 2**30},
    "by_category": {"parameter": 4 * 2**30},
    "step_seconds": 2.0,
}
STEP = {"loss": 1.5, "tokens": 1000, "tokens_per_second": 500.0, "skipped_steps": 0}


@pytest.fixture
def run(tmp_path):
    def write(name, *records, model=True):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "recipe.yaml").write_text("name: mine\nmodel: {name_or_path: some/model}\n")
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
        if model:
            (folder / "model").mkdir()
        return str(folder)

    return write


@pytest.fixture
def finished(run):
    return run(
        "finished",
        {"step": 0, "estimated": {**PEAKS, "peak_bytes": 9 * 2**30}},
        {"step": 1, **STEP},
        {"step": 2, **STEP, "skipped_steps": 1},
        {"step": 2, "eval_loss": 1.25},
        {"step": 2, "measured": PEAKS},
    )


def test_two_runs_stand_side_by_side_within_80_columns(finished, run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    killed = run("killed[lr=1]", {"step": 0, "estimated": PEAKS}, {"step": 1, **STEP}, model=False)
    assert main(["report", finished, killed]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "killed[lr=1]" in shown
    lines = {line.split("  ")[0]: line for line in shown.splitlines()}
    assert lines["status"].split()[1:] == ["finished", "unfinished"]
    assert "9.00 GiB / 10.0 GiB" in lines["peak of tensors"]
    assert "10.0 GiB / -" in lines["peak of tensors"]
    assert "-10.0%" in shown
    assert "1.2500" in lines["held-out loss"]
    assert "1" in lines["steps skipped"]


ENDED = (
    {"step": 0, "eval_loss": 3.25},
    {"step": 1, **STEP},
    {"step": 1, "eval_loss": 1.0},
    {"step": 2, **STEP},
    {"step": 2, "eval_loss": 2.0},
    {
        "step": 2,
        "measured": PEAKS,
        "seconds": 5400.0,
        "device": "NVIDIA H100 80GB HBM3",
        "num_processes": 2,
    },
    {"step": 2, "best_step": 1, "stopped": "Enough."},
)


def test_a_single_run_ends_with_how_it_went_and_what_to_type_next(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    folder = run("it", *ENDED)
    assert main(["report", folder]) == 0
    shown = capsys.readouterr().out
    lines = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in shown.splitlines()}
    assert lines["held-out loss at step 0"] == "3.2500"
    assert lines["held-out loss"] == "1.0000"  # the model's, not the last
    assert lines["best step, that of the model"] == "1"
    assert lines["time of the run"] == "90 min"
    price = load_gpus()["h100-80gb"].cheapest_price
    assert price is not None
    assert lines["cost"] == f"${3 * price.usd_per_hour:.2f}"
    assert f"({price.provider}, {price.date})" in " ".join(shown.split())
    assert "it ended before its last step. Enough." in shown
    assert f"The model is in {folder}/model; from_pretrained" in " ".join(shown.split())
    assert main(["report", folder, run("other", *ENDED)]) == 0
    assert "from_pretrained" not in capsys.readouterr().out


def test_answers_to_long_prompts_are_shown_whole_within_80_columns(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    folder = Path(run("it", *ENDED))
    prompt = "You are asked about numbers. " * 9 + "What is 2 + 3?"
    answers = {0: "That is a question of which I know nothing. " * 3, 1: "", 2: "Five."}
    lines = [{"step": step, "index": 0, "prompt": prompt, "answer": said} for step, said in answers.items()]
    (folder / "generations.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert main(["report", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 or str(folder) in line for line in shown.splitlines())  # paths are not cut
    words = " ".join(shown.split())
    assert f"What is 2 + 3? at step 0 {answers[0].strip()} at step 1 (nothing)" in words  # the best step's


TRAIN = "import sys; from lowmem_ft.cli.commands.train import main; sys.exit(main(sys.argv[1:]))"


def test_a_run_ends_with_its_report(forks, tmp_path, capsys):
    settings = ("training.use_cpu=true", "budget.preflight=false", "training.max_steps=2")
    done = forks.run(TRAIN, "recipe=tiny", *settings, f"training.output_dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    assert "held-out loss" in done.stdout
    assert main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == done.stdout


def test_a_device_without_a_price_costs_nothing_known(run, capsys):
    assert main(["report", run("it", {**ENDED[-2], "device": "cpu"})]) == 0
    assert "cost" not in capsys.readouterr().out


def typed(document):
    """What a document shows, as one line."""
    console = Console(width=200, file=io.StringIO())
    console.print(document)
    return " ".join(console.file.getvalue().replace("\\\n", "").split())


@pytest.mark.parametrize(
    "settings,typed_next",
    [
        ((), ["lowmem-ft chat", "lowmem-ft export", "lowmem-ft report", "hf upload it"]),
        (("training.push_to_hub=true",), ["lowmem-ft chat", "lowmem-ft export", "lowmem-ft report"]),
        (
            ("adapter.name=lora",),
            ["lowmem-ft chat", "lowmem-ft merge", "lowmem-ft export", "lowmem-ft report", "hf upload it"],
        ),
        (("adapter.name=lora", "model.weights=random"), ["lowmem-ft report"]),
    ],
)
def test_commands_are_those_that_the_model_can_be_given_to(tmp_path, settings, typed_next):
    recipe = load_recipe("tiny", ["model.weights=pretrained", *settings])
    record = RunRecord(path=tmp_path / "it", recipe=recipe, metrics=(), is_finished=True)
    document = next_steps(record)
    assert document is not None
    words = typed(document)
    commands = ("lowmem-ft chat", "lowmem-ft merge", "lowmem-ft export", "lowmem-ft report", "hf upload it")
    assert [command for command in commands if command in words] == typed_next
    subcommands = re.findall(r"lowmem-ft (\w+)", words)
    assert set(subcommands) <= set(COMMANDS)
    assert next_steps(dataclasses.replace(record, is_finished=False)) is None


def test_a_run_without_an_estimate_says_why(run, capsys):
    assert main(["report", run("alone", {"step": 1, **STEP})]) == 0
    assert "No estimate was made for alone" in " ".join(capsys.readouterr().out.split())


def test_json_has_the_errors(finished, capsys):
    assert main(["report", finished, "--json"]) == 0
    ((run),) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["steps"], run["finished"]) == (2, True)
    assert run["errors"]["peak of tensors"] == pytest.approx(-0.1)


def test_json_has_no_numbers_that_json_lacks(run, capsys):
    folder = run("diverged", {"step": 1, **STEP, "loss": float("nan")})
    assert main(["report", folder, "--json"]) == 0
    assert "NaN" not in (shown := capsys.readouterr().out)
    assert json.loads(shown)["runs"][0]["loss"] is None


def test_a_run_that_took_no_step_has_a_report(run, capsys):
    assert main(["report", run("none", model=False)]) == 0
    assert "unfinished" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line,words",
    [
        ('{"a": 1}', "line 1, is not from a run of lowmem_ft"),
        ('{"step": 1, "loss": 2}', "line 1, is not a record of a run"),
        ("nothing", "line 1 is not a JSON object"),
        ("\udcff\udcfe", "line 1 is not a JSON object"),
        (
            '{"step": 1, "loss": "low", "tokens": 1, "tokens_per_second": 1}',
            "line 1, is not a record of a run",
        ),
        (json.dumps({"step": 1, "measured": {**PEAKS, "peak_bytes": "10 GiB"}}), "'10 GiB' is not a number"),
        ('{"step": 1, "measured": {"peak": 1}}', "peaks that this version cannot read"),
    ],
)
def test_other_peoples_files_are_refused(run, capsys, line, words):
    folder = run("foreign")
    Path(folder, "metrics.jsonl").write_text(line + "\n", "utf-8", "surrogateescape")
    assert main(["report", folder]) == 2
    assert words in capsys.readouterr().err


def test_all_that_are_no_runs_are_named(tmp_path, capsys):
    assert main(["report", str(tmp_path), "nowhere"]) == 2
    errors = capsys.readouterr().err
    assert "has no recipe.yaml and no metrics.jsonl" in errors
    assert "nowhere, which is not a folder" in errors


def test_what_was_measured_is_set_beside_the_estimate_of_its_own_settings(run, capsys):
    other = {**PEAKS, "peak_bytes": 4 * 2**30}
    lines = [{"step": 0, "estimated": PEAKS}, {"step": 1, **STEP}, {"step": 1, "measured": PEAKS}]
    killed_again = run("resumed", *lines, {"step": 1, "estimated": other}, model=False)
    assert main(["report", killed_again, "--json"]) == 0
    ((shown),) = json.loads(capsys.readouterr().out)["runs"]
    assert shown["estimated"] == shown["measured"] == PEAKS


def test_what_was_rehearsed_stands_beside_what_was_measured(finished, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    rehearsed = {
        "peaks": {**PEAKS, "peak_bytes": 8 * 2**30},
        "run": {"steps": 3, "tokens": 900, "model_bytes": None},
        "recipe": "",
    }
    (Path(finished) / "rehearsal.json").write_text(json.dumps(rehearsed))
    assert main(["report", finished]) == 0
    shown = capsys.readouterr().out
    lines = {line.split("  ")[0]: line for line in shown.splitlines()}
    assert "3 / 2" in lines["steps of the run"]
    assert "900 / 1,000" in lines["tokens of the run"]
    assert "8.00 GiB / 10.0 GiB" in lines["peak of tensors, real batches"]
    assert "had different settings from the run" in shown


def test_a_file_that_is_of_no_rehearsal_is_refused(finished, capfd):
    (Path(finished) / "rehearsal.json").write_text("[]")
    assert main(["report", finished]) == 2
    assert "rehearsal.json is not the result of a rehearsal" in capfd.readouterr().err


MEASURED = {"step": 2, "measured": PEAKS, "seconds": 9.0, "num_processes": 1}


@pytest.fixture
def page_of(run, tmp_path, monkeypatch, capsys):
    """Write a run of the tiny recipe as a page; return that."""
    monkeypatch.chdir(tmp_path)

    def write(*records):
        folder = Path(run("a-run", {"step": 1, **STEP}, *records))
        (folder / "recipe.yaml").write_text("base: tiny\n")
        assert main(["report", str(folder), "--html"]) == 0
        assert " ".join(capsys.readouterr().out.split()) == f"The report of {folder} is in a-run.html."
        page = Page((tmp_path / "a-run.html").read_text("utf-8"))
        page.check_loads_nothing()
        return page

    return write


def test_a_page_has_the_timeline_of_the_runs_gpu(page_of):
    page = page_of({**MEASURED, "device": "NVIDIA H100 80GB HBM3"})
    assert "h100-80gb has 79.2 GiB" in page.text
    assert "seconds of a step, by the clock of h100-80gb" in page.text
    assert "gradient_accumulation_steps: 2" in page.text


@pytest.mark.parametrize(
    "records,words",
    [
        ([], "has not measured its memory yet"),
        ([{**MEASURED, "device": "Unheard-of 9000"}], "does not have Unheard-of 9000"),
    ],
)
def test_a_page_says_why_it_has_no_timeline(page_of, records, words):
    assert words in page_of(*records).text


def test_a_page_of_a_recipe_that_cannot_be_estimated_says_why(run, tmp_path, monkeypatch, capsys):
    folder = run("hub", {"step": 1, **STEP}, {**MEASURED, "device": "cpu"})
    assert main(["report", folder, "--html", str(tmp_path / "hub.html")]) == 0
    page = Page((tmp_path / "hub.html").read_text("utf-8"))
    assert "No step is estimated: " in page.text
    assert "some/model" in page.text


def test_a_page_replaces_no_file_unasked(finished, tmp_path, capsys):
    file = tmp_path / "kept.html"
    file.write_text("mine")
    assert main(["report", finished, "--html", str(file)]) == 2
    assert "which exists already. Name another, or add --overwrite" in capsys.readouterr().err
    assert file.read_text() == "mine"
    assert main(["report", finished, "--html", str(file), "--overwrite"]) == 0
    assert file.read_text().startswith("<!doctype html>")
