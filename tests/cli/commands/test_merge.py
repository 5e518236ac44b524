"""`lowmem-ft merge`, as a user meets it."""

from __future__ import annotations

import errno
import shutil

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("peft")

from lowmem_ft.cli import main
from lowmem_ft.training.export import merging

IDS = torch.arange(40).view(2, 20)


@pytest.fixture(autouse=True)
def _captured_logs(monkeypatch, caplog):
    """Ours would write to a stream that the next test has closed."""
    caplog.set_level("INFO")


@pytest.fixture
def folders(base_and_adapter):
    return base_and_adapter(hidden_size=32)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_new_folder_is_the_adapted_model(folders, dtype, caplog):
    tmp_path, base, adapter, adapted = folders
    assert main(["merge", str(adapter), str(tmp_path / "out"), "--dtype", dtype]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert merged.dtype == (torch.bfloat16 if dtype == "auto" else torch.float32)
    wanted, found = adapted.float()(IDS).logits, merged.float()(IDS).logits
    plain = AutoModelForCausalLM.from_pretrained(base).float()(IDS).logits
    error, change = (found - wanted).norm(), (wanted - plain).norm()
    assert error < (1e-2 if dtype == "auto" else 1e-5) * change
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 512
    rounded = " and rounded to bfloat16" if dtype == "auto" else ""
    assert f"14 layers merged in float32{rounded}." in caplog.text
    assert f"The model is in {tmp_path / 'out'}." in caplog.text


def test_the_merged_model_has_a_card_with_what_the_adapters_card_says(folders):
    tmp_path, _, adapter, _ = folders
    card = """---
library_name: peft
base_model: Qwen/Qwen2.5-7B
base_model_relation: adapter
datasets: [HuggingFaceH4/ultrachat_200k]
license: apache-2.0
tags: [lowmem_ft, lora]
---

# mine

| optimizer steps | 7 |

## Settings
"""
    (adapter / "README.md").write_text(card)
    assert main(["merge", str(adapter), str(tmp_path / "out")]) == 0
    written = ModelCard.load(tmp_path / "out" / "README.md")
    assert (written.data.base_model, written.data.base_model_relation) == ("Qwen/Qwen2.5-7B", "finetune")
    assert (written.data.license, written.data.library_name) == ("apache-2.0", "transformers")
    assert written.data.datasets == ["HuggingFaceH4/ultrachat_200k"]
    assert written.data.tags == ["lowmem_ft"]
    assert "# out" in written.text
    assert "| optimizer steps | 7 |\n\n### Settings" in written.text
    assert str(tmp_path) not in str(written)


def test_without_a_card_of_the_adapter_the_licence_is_the_bases(folders):
    tmp_path, base, adapter, _ = folders
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    assert main(["merge", str(adapter), str(tmp_path / "out")]) == 0
    written = ModelCard.load(tmp_path / "out" / "README.md")
    assert (written.data.license, written.data.base_model) == ("mit", None)
    assert "A local model with LoRA adapters added" in written.text


def test_a_base_that_has_moved_can_be_named(folders, capsys):
    tmp_path, base, adapter, _ = folders
    base.rename(tmp_path / "moved")
    assert main(["merge", str(adapter), str(tmp_path / "out")]) == 2
    assert f"{base} is not a folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["merge", str(adapter), str(tmp_path / "out"), "--base", str(tmp_path / "moved")]) == 0


def test_a_run_stands_for_the_model_that_it_has_trained(folders, capsys, caplog):
    tmp_path, base, adapter, _ = folders
    assert main(["merge", str(adapter), str(tmp_path / "by name")]) == 0
    run = tmp_path / "run"
    shutil.move(adapter, run / "model")
    (run / "recipe.yaml").write_text(f"model: {{name_or_path: {base}}}\nadapter: {{name: lora}}\n")
    (run / "metrics.jsonl").write_text("")
    assert main(["merge", str(run), str(tmp_path / "by run")]) == 0
    assert f"{run} holds a run: its model is used." in caplog.text
    by_name, by_run = (load_file(tmp_path / name / "model.safetensors") for name in ("by name", "by run"))
    assert by_name.keys() == by_run.keys()
    assert all(torch.equal(by_name[name], by_run[name]) for name in by_name)
    (run / "model" / "adapter_config.json").unlink()
    assert main(["merge", str(run), str(tmp_path / "none")]) == 2
    assert "neither a finished model (model/) nor a complete checkpoint" in capsys.readouterr().err


def test_nothing_is_overwritten(folders, capsys):
    _, base, adapter, _ = folders
    before = sorted(base.iterdir())
    assert main(["merge", str(adapter), str(base)]) == 2
    assert "exists already, and is not empty" in capsys.readouterr().err
    assert sorted(base.iterdir()) == before


def test_a_full_disk_leaves_nothing_and_says_so(folders, capsys, monkeypatch):
    tmp_path, _, adapter, _ = folders

    def refuses(model, tokenizer, folder):
        (folder / "config.json").write_text("{}")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(merging, "save_model", refuses)
    assert main(["merge", str(adapter), str(tmp_path / "merged")]) == 2
    told = capsys.readouterr().err
    assert "merged cannot be written: [Errno 28] No space left on device" in told
    assert "Nothing is left of it; free some space" in told
    assert sorted(one.name for one in tmp_path.iterdir()) == ["adapter", "base"]


def test_a_base_that_was_rounded_while_training_is_mentioned(folders, caplog):
    tmp_path, _, adapter, _ = folders
    shutil.move(adapter, tmp_path / "run" / "model")
    (tmp_path / "run" / "recipe.yaml").write_text(
        "model: {name_or_path: any, quantization: nf4}\nadapter: {name: lora}\n"
    )
    assert main(["merge", str(tmp_path / "run" / "model"), str(tmp_path / "out")]) == 0
    assert "trained on weights rounded by model.quantization=nf4" in caplog.text


@pytest.mark.filterwarnings("error")
def test_a_merge_raises_no_warning_of_a_library(folders):
    tmp_path, _, adapter, _ = folders
    assert main(["merge", str(adapter), str(tmp_path / "quiet")]) == 0


def test_an_adapter_of_random_weights_says_why_there_is_nothing_to_merge_it_into(folders, capsys):
    tmp_path, base, adapter, _ = folders
    run = tmp_path / "run"
    shutil.copytree(adapter, run / "model")
    (run / "recipe.yaml").write_text(
        f"model: {{name_or_path: {base}, weights: random}}\nadapter: {{name: lora}}\n"
    )
    assert main(["merge", str(run / "model"), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "were random (model.weights=random in " in said
    assert "Train it with model.weights=pretrained" in said
    assert not (tmp_path / "out").exists()
    assert main(["merge", str(run / "model"), str(tmp_path / "out"), "--base", str(base)]) == 0
