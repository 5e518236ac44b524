"""scripts/trl on the tiny model: they train, save, and lose what the stock trainer loses."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch

from lowmem_ft.foundation.errors import DataError

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts" / "trl"
SHARED = (
    "training.use_cpu=true",
    "training.max_steps=2",
    "training.save_steps=null",
    "budget.preflight=false",
)


def run(name, folder, *arguments):
    torch.manual_seed(0)
    main = runpy.run_path(str(SCRIPTS / f"{name}.py"))["main"]
    trainer = main(["--recipe", "tiny", *arguments, *SHARED, f"training.output_dir={folder}"])
    assert (folder / "model.safetensors").is_file() or (folder / "adapter_model.safetensors").is_file()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


@pytest.fixture
def pairs(tmp_path):
    rows = []
    for line in (ROOT / "recipes" / "tiny" / "data.jsonl").read_text().splitlines()[:16]:
        *prompt, answer = json.loads(line)["messages"]
        bad = {"role": "assistant", "content": "No idea at all."}
        rows.append({"prompt": prompt, "chosen": [answer], "rejected": [bad]})
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def prefers_long_answers(completions, **_):
    return [float(len(str(one)) % 7) for one in completions]


@pytest.mark.parametrize("name", ["sft", "dpo", "grpo"])
def test_a_mistake_is_a_line_and_no_traceback(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [name, "--recipe", "tiny", "training.learning_rat=1"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "error: training.learning_rat is not a recipe key. Did you mean `training.learning_rate`?\n"
    )


def test_rows_of_the_other_kind_are_refused_before_a_model_is_loaded(pairs, tmp_path):
    with pytest.raises(DataError, match=r"pairs.jsonl holds preferences .*TRL's DPOTrainer"):
        run("sft", tmp_path / "run", f"data={pairs}")
    with pytest.raises(
        DataError, match=r"a column `chosen` and one `rejected`, and .* has messages\. .*SFTTrainer"
    ):
        run("dpo", tmp_path / "run", "loss.chunk_tokens=null")
    judged = tmp_path / "judged.jsonl"
    judged.write_text('{"prompt": "Hi", "completion": " Ho", "label": true}\n' * 16)
    with pytest.raises(DataError, match=r"judged.jsonl: label=true judges the answer .*TRL's KTOTrainer"):
        run("sft", tmp_path / "run", f"data={judged}")


def test_sft(tmp_path):
    stock, _ = run("sft", tmp_path / "stock", "--stock")
    losses, trainer = run("sft", tmp_path / "ours", "optimizer.state=bf16")
    assert losses == pytest.approx(stock, abs=2e-3)
    assert any("eval_loss" in entry for entry in trainer.state.log_history)


@pytest.mark.parametrize("adapter", [(), ("adapter.name=lora", "adapter.r=4")], ids=["full", "lora"])
def test_dpo(adapter, pairs, tmp_path):
    settings = (
        f"data.path={pairs}",
        "data.eval_size=null",
        "training.eval_steps=null",
        "loss.chunk_tokens=null",
        *adapter,
    )
    stock, _ = run("dpo", tmp_path / "stock", "--stock", *settings)
    losses, _ = run("dpo", tmp_path / "ours", *settings)
    assert losses == pytest.approx(stock, abs=1e-5)
    assert stock[0] == pytest.approx(0.6931, abs=1e-3)  # the model is its own reference before the first step


def test_grpo(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    settings = (
        "--reward",
        f"{Path(__file__).stem}:prefers_long_answers",
        "--generations",
        "4",
        "--tokens",
        "8",
    )
    losses, trainer = run("grpo", tmp_path / "ours", *settings, "loss.chunk_tokens=null")
    assert len(losses) == 2
    assert trainer.state.log_history[0]["reward_std"] > 0
