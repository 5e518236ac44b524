"""What a name on the command line means: a model, an adapter with its base, what a run has trained."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from lowmem_ft.cli import main
from lowmem_ft.foundation.errors import RecipeError, UserError
from lowmem_ft.training.export.model_source import find_model, forward_recipe
from lowmem_ft.training.run.loop import train

SHORT = ("training.max_steps=2", "training.eval_steps=null", "budget.preflight=false")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run with a checkpoint, and one of adapters on its model; with their held-out losses."""
    from lowmem_ft.recipe import load_recipe

    folder = tmp_path_factory.mktemp("runs")

    def run(name, *settings):
        recipe = load_recipe(
            "tiny", [f"training.output_dir={folder / name}", "training.use_cpu=true", *SHORT, *settings]
        )
        return folder / name, train(recipe).evaluation

    whole = run("whole", "training.save_steps=2")
    base = f"model={whole[0] / 'model'}"
    return {
        "whole": whole,
        "adapter": run("adapter", base, "model.weights=pretrained", "adapter.name=lora", "adapter.r=4"),
        "nf4": run("nf4", base, "model.weights=pretrained", "adapter.name=lora", "model.quantization=nf4"),
    }


def test_a_run_is_its_finished_model_or_else_its_newest_checkpoint(runs, tmp_path):
    folder, _ = runs["whole"]
    assert find_model(str(folder)).model.name_or_path == str(folder / "model")
    killed = tmp_path / "killed"
    shutil.copytree(folder, killed, ignore=shutil.ignore_patterns("model"))
    assert find_model(str(killed)).model.name_or_path == str(killed / "checkpoint-2")
    shutil.rmtree(killed / "checkpoint-2")
    with pytest.raises(UserError, match="neither a finished model"):
        find_model(str(killed))


def test_an_adapter_comes_with_its_base_and_its_tokenizer(runs):
    folder, _ = runs["adapter"]
    for name in (folder, folder / "model"):
        source = find_model(str(name))
        assert source.adapter == folder / "model"
        assert source.model.name_or_path == str(runs["whole"][0] / "model")
        assert source.model.tokenizer_name_or_path == str(folder / "model")
        assert source.recipe is not None


def test_a_base_is_for_adapters_alone(runs):
    with pytest.raises(UserError, match="is the base of an adapter"):
        find_model(str(runs["whole"][0]), base="other")


def test_a_hub_name_stays_one():
    source = find_model("Qwen/Qwen2.5-7B")
    assert (source.model.name_or_path, source.adapter, source.recipe) == ("Qwen/Qwen2.5-7B", None, None)


def test_settings_of_training_are_refused_and_data_replaces_a_runs_own(runs):
    source = find_model(str(runs["nf4"][0]))
    assert forward_recipe(source, []).model.quantization == "nf4"
    assert forward_recipe(source, []).data.has_held_out
    other = forward_recipe(source, ["data=other.jsonl", "model.quantization=none"])
    assert (other.data.path, other.data.has_held_out, other.model.quantization) == (
        "other.jsonl",
        False,
        "none",
    )
    with pytest.raises(UserError, match=r"Nothing is trained here, got offload\.optimizer, optimizer\.name"):
        forward_recipe(source, ["optimizer.name=lion", "offload.optimizer=host"])
    with pytest.raises(RecipeError, match="Did you mean `data"):
        forward_recipe(source, ["data.pat=x"])


@pytest.mark.parametrize("name", ["whole", "adapter", "nf4"])
def test_a_run_is_evaluated_as_at_its_end(name, runs, capsys):
    """Also without its folder's model, and with its weights streamed: the same code, and the same bits."""
    folder, evaluation = runs[name]
    settings = ["offload.parameters=stream"] if name == "adapter" else []
    assert main(["evaluate", str(folder), *settings, "--json", "-"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["loss"] == evaluation.loss
    assert said["label_tokens"] == evaluation.num_label_tokens
    assert said["is_held_out"]
    assert said["estimated_peak_bytes"] > 0


def test_other_data_counts_as_a_whole_and_in_any_form(runs, tmp_path, capsys):
    file = tmp_path / "lines.txt"
    file.write_text("The capital of Norway is Oslo.\nA lemon is yellow.\n")
    arguments = ["evaluate", str(runs["whole"][0]), f"data={file}", "budget.preflight=false", "--json", "-"]
    assert main(arguments) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["estimated_peak_bytes"] is None
    assert not said["is_held_out"]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = runs["whole"][0] / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    total = count = 0.0
    for line in file.read_text().splitlines():
        ids = torch.tensor([[*tokenizer(line)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            total += float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert said["label_tokens"] == count
    assert said["loss"] == pytest.approx(total / count, rel=1e-5)
