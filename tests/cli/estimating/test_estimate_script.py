from __future__ import annotations

import dataclasses
import json

import pytest

from lowmem_ft.cli import main
from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.planning.script_runs import ScriptError, estimate_script

LOOP = """
import sys
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float32
model = torch.nn.Linear(int(sys.argv[1]), 256, device=device, dtype=dtype)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.randn(4, int(sys.argv[1]), device=device, dtype=dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("weights are real")
"""


@pytest.fixture
def loop(tmp_path, monkeypatch):
    (tmp_path / "loop.py").write_text(LOOP, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return ["estimate", "--script", "loop.py"]


def test_the_report_is_that_of_a_recipe_and_says_where_the_script_is(loop, capsys):
    assert main([*loop, "--gpu", "t4", "--", "1024"]) == 0
    said = capsys.readouterr().out
    assert "Linear fits on t4" in said
    assert "the peak is at loop.py:10" in said
    assert "host waits    never a step" in said
    assert "weights are real" not in said
    assert all(len(line) <= 80 for line in said.splitlines())


def test_what_does_not_fit_is_told_with_ways_to_make_it_fit_and_no_speed_of_no_tokens(loop, capsys):
    assert main([*loop, "--gpu", "t4", "--", "40000000"]) == 3
    said = capsys.readouterr().out
    words = " ".join(said.split())
    assert "How to make it fit: the largest part is " in words
    assert "Other GPUs: --gpu all." in words
    assert "0 tokens" not in words
    assert all(len(line) <= 80 for line in said.splitlines())
    assert main([*loop, "--gpu", "all", "--", "4000000000"]) == 3
    assert "How to make it fit: " in capsys.readouterr().out


@pytest.mark.parametrize("line", ["torch.zeros(1).cuda()", 'torch.zeros(1, device="cuda")'])
def test_an_error_where_there_is_no_gpu_says_for_what_it_was_estimated(line, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lowmem_ft.cli.estimating.estimate_script.may_have_gpu", lambda: False)
    (tmp_path / "cuda.py").write_text(f"import torch\nx = {line}\n")
    assert main(["estimate", "--script", str(tmp_path / "cuda.py")]) == 2
    assert "This is an estimate for the processor. See GPUs with --gpu NAME" in capsys.readouterr().err


def test_json_is_alone_on_stdout_and_what_does_not_fit_is_told_by_the_exit_code(loop, capsys, tmp_path):
    assert (
        main([*loop, "--gpu", "t4", "--steps", "2", "--json", "-", "--plot", "m.html", "--", "40000000"]) == 3
    )
    values = json.loads(capsys.readouterr().out)
    assert not values["fits"]
    assert values["script"]["steps"] == 2
    assert values["script"]["arguments"] == ["40000000"]
    assert values["device"]["allocated_peak_bytes"] > 2 * 40_000_000 * 256 * 4
    assert (tmp_path / "m.html").stat().st_size > 1000


TRAINER = """
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, default_data_collator

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=4096))
rows = [{"input_ids": [1] * 512, "labels": [1] * 512}] * ROWS
Trainer(
    model, TrainingArguments("out", per_device_train_batch_size=ROWS, max_steps=5), train_dataset=rows,
    data_collator=default_data_collator,
).train()
"""
TOO_MUCH = TRAINER.replace("ROWS", "2048")


def test_what_attaching_would_save_is_seen_in_a_second_run_of_a_trainers_script(loop, capsys, tmp_path):
    (tmp_path / "train.py").write_text(TOO_MUCH, encoding="utf-8")
    assert main(["estimate", "--script", "train.py", "--gpu", "l4", "--json", "j.json"]) == 3
    said = capsys.readouterr().out
    assert "hf.attach     " in said
    assert "by running this script again with them" in " ".join(said.split())
    values = json.loads((tmp_path / "j.json").read_text())
    before, after = values["attach"]["process_peak_bytes"]
    assert before == values["device"]["process_peak_bytes"]
    assert after < 0.65 * before
    assert "loss.chunk_tokens=1024" in values["attach"]["settings"]


def test_what_fits_is_run_once(loop, capsys, tmp_path):
    (tmp_path / "train.py").write_text(TRAINER.replace("ROWS", "8"), encoding="utf-8")
    assert main(["estimate", "--script", "train.py", "--gpu", "l4", "--json", "j.json"]) == 0
    assert "hf.attach" not in capsys.readouterr().out
    assert json.loads((tmp_path / "j.json").read_text())["attach"] is None


OF_ONES_OWN = """
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, WIDE)

    def forward(self, x, labels=None):
        return {"loss": nn.functional.cross_entropy(self.layer(x), labels)}

rows = [{"x": torch.randn(64), "labels": torch.tensor(1)}] * 64
Trainer(Net(), TrainingArguments("out"), train_dataset=rows).train()
"""


def test_a_trainer_around_a_model_of_ones_own_is_estimated_and_told_what_attach_takes(loop, capsys, tmp_path):
    (tmp_path / "train.py").write_text(OF_ONES_OWN.replace("WIDE", "80_000_000"), encoding="utf-8")
    assert main(["estimate", "--script", "train.py", "--gpu", "l4"]) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "Net does not fit on l4" in said
    assert "hf.attach not estimated: hf.attach() takes models of transformers" in said


@pytest.mark.parametrize("becomes", ["larger", "an error"])
def test_no_line_promises_what_is_worse_or_fails(becomes, loop, capsys, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(TOO_MUCH, encoding="utf-8")
    runs = []

    def estimate(*args, **kwargs):
        if not runs:
            runs.append(estimate_script(*args, **kwargs))
            return runs[0]
        if becomes == "an error":
            raise ScriptError("train.py ended in an error", "of ours")
        peak = runs[0].estimate.process_peak_bytes + 1
        return dataclasses.replace(
            runs[0], estimate=dataclasses.replace(runs[0].estimate, process_peak_bytes=peak)
        )

    monkeypatch.setattr("lowmem_ft.cli.estimating.estimate_script.estimate_script", estimate)
    assert main(["estimate", "--script", "train.py", "--gpu", "l4", "--steps", "2", "--json", "j.json"]) == 3
    assert "hf.attach" not in capsys.readouterr().out
    assert json.loads((tmp_path / "j.json").read_text())["attach"] is None


def test_all_gpus_are_told_from_two_runs(loop, capsys):
    assert main([*loop, "--gpu", "all", "--json", "all.json", "--", "1024"]) == 0
    assert f"fits on {len(load_gpus())} of {len(load_gpus())} GPUs" in capsys.readouterr().out
    with open("all.json", encoding="utf-8") as file:
        values = json.load(file)
    parameters = {
        each["gpu"]["name"]: each["by_category_at_peak"]["parameter"] for each in values["estimates"]
    }
    assert parameters["t4"] == pytest.approx(2 * parameters["l4"], rel=0.01)
