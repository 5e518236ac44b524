"""``lowmem-ft gpus`` and ``lowmem-ft models``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from processes import LIMIT_SECONDS

from lowmem_ft.cli import main
from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.foundation.catalog.model_architectures import load_architectures
from lowmem_ft.recipe import shipped_recipes


def test_gpus_lists_each_on_a_whole_line(capsys):
    assert main(["gpus"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(load_gpus())
    line = next(line for line in lines if line.startswith("rtx-4090 "))
    assert line.split()[:7] == ["rtx-4090", "23.6", "8.9", "128", "165", "1008", "4.0"]


def test_one_gpu_shows_its_prices_and_sources(capsys):
    assert main(["gpus", "L40S"]) == 0
    out = capsys.readouterr().out
    assert "CoreWeave, 2026-09-20: https://" in out
    assert "memory_mib: " in out


def test_models_lists_parameters_and_hub_id(capsys):
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(load_architectures())
    line = next(line for line in lines if line.startswith("llama-3.1-8b "))
    assert line.split()[:5] == ["llama-3.1-8b", "8.03B", "32", "4096", "128256"]
    assert line.split()[5:] == ["gated", "llama3.1", "meta-llama/Llama-3.1-8B"]


def test_one_model_shows_its_variants_and_sources(capsys):
    assert main(["models", "Qwen/Qwen2.5-7B-Instruct"]) == 0
    out = capsys.readouterr().out
    assert "7,615,616,512 parameters" in out
    assert ["Qwen/Qwen2.5-7B-Instruct", "(max_position_embeddings=32768)"] in [
        *map(str.split, out.splitlines())
    ]


@pytest.mark.parametrize("command,count", [("gpus", len(load_gpus())), ("models", len(load_architectures()))])
def test_json_holds_every_row(capsys, command, count):
    assert main([command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["schema"] == 1
    assert len(printed[command]) == count


@pytest.mark.parametrize(
    "words",
    [
        ["--json", "-"],
        ["--json", "rtx-4090"],
        ["rtx-4090", "--json"],
        ["rtx-4090", "--json", "-"],
        ["--json=-", "rtx-4090"],
    ],
    ids=" ".join,
)
def test_json_goes_to_stdout_with_a_dash_or_without(capsys, words):
    assert main(["gpus", *words]) == 0
    listed = [row["name"] for row in json.loads(capsys.readouterr().out)["gpus"]]
    assert listed == (["rtx-4090"] if "rtx-4090" in words else list(load_gpus()))


@pytest.mark.parametrize("command", ["gpus", "models", "recipes"])
def test_json_goes_to_a_file_too_which_is_not_replaced_unasked(capsys, tmp_path, command):
    file = tmp_path / "list.json"
    assert main([command, "--json", str(file)]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(file.read_text())[command]
    assert main([command, "--json", str(file)]) == 2
    assert "which exists already" in capsys.readouterr().err
    assert main([command, "--json", str(file), "--overwrite"]) == 0


def test_recipes_as_json_are_the_list_or_the_settings_of_one(capsys):
    assert main(["recipes", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["recipes"]}
    assert list(rows) == list(shipped_recipes())
    assert rows["7b-qlora"]["needs"]["process_peak_bytes"] > 2**30
    assert rows["7b-qlora"]["description"]
    assert main(["recipes", "--json", "7b-qlora", "training.seed=5"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert (settings["training.seed"], settings["model.quantization"]) == (5, "nf4")


@pytest.mark.parametrize("command", ["gpus", "models"])
def test_the_tables_need_no_torch(command):
    code = (
        f"import sys; from lowmem_ft.cli import main; main(['{command}']);"
        "print({'torch', 'transformers', 'omegaconf', 'numpy'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.stderr.strip() == "set()"
