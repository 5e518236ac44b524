"""Answers of the page are those of the commands."""

from __future__ import annotations

import ast
import importlib.util
import json
import shlex

import pytest
from smaller_recipes import with_smaller_recipes

from lowmem_ft.cli import main
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.recipe import load_recipe
from lowmem_ft.recipe.checks.path_checks import check_sizes_of_model
from lowmem_ft.ui import answering, views
from lowmem_ft.ui.form import FROM_RECIPE, METHOD_SETTINGS, Form
from lowmem_ft.ui.kept_files import KeptFiles

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
_OF_A_RUN = ("trace_seconds", "versions")


@pytest.fixture
def asked(tmp_path):
    files = KeptFiles(tmp_path / "kept")
    name = files.keep_config(json.dumps(CONFIG).encode())

    def asked(**fields):
        form = Form(**{"model": name, **fields})
        form.check(files)
        return answering.Asked(
            method=form.method,
            recipe=form.recipe,
            settings=form.settings(files),
            of_method=METHOD_SETTINGS.get(form.method, ()),
            devices=form.devices,
        )

    return asked


def json_of_command(command, tmp_path):
    program, *words = shlex.split(command)
    assert program == "lowmem-ft"
    file = tmp_path / "estimate.json"
    main([*words, "--json", str(file)])
    return json.loads(file.read_text())


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "lora", "length": "256"},
        {"method": "recipe", "recipe": "tiny", "model": FROM_RECIPE, "gpu": "", "budget": "16"},
        {"method": "full", "gpus": "2", "more": "optimizer.name=sgd"},
    ],
)
def test_the_copied_command_gives_the_same_number(asked, tmp_path, fields):
    said = []
    answer = answering.estimate(asked(**fields), said.append)
    of_command = json_of_command(answer["command"], tmp_path)
    for values in (answer["values"], of_command):
        for name in _OF_A_RUN:
            values.pop(name)
    assert json.loads(json.dumps(answer["values"])) == of_command
    assert "running one step on a virtual GPU" in said
    assert f'data-bytes="{of_command["device"]["process_peak_bytes"]}"' in views.estimate_html(answer)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "pythia-70m", "method": "recipe", "recipe": "7b-lora", "gpus": "2"},
        {"model": "gpt2", "method": "recipe", "recipe": "8b-fsdp2", "gpus": "2"},
        {"method": "recipe", "recipe": "8b-16gb", "length": ""},
    ],
)
def test_a_small_model_takes_what_a_recipe_has_for_its_own(asked, fields):
    """It has fewer layers than the recipe counts, or shorter rows: neither was typed."""
    request, _ = answering._settled(asked(**fields), lambda doing: None)
    check_sizes_of_model(request.recipe)
    assert load_recipe(request.recipe_name, request.settings).fitted


def test_the_recipe_and_the_script_are_of_the_same_run(asked, tmp_path):
    answer = answering.estimate(asked(length="128"), lambda text: None)
    file = tmp_path / "copied.yaml"
    file.write_text(answer["recipe"])
    recipe = load_recipe(str(file))
    assert (recipe.data.max_length, recipe.adapter.name) == (128, "lora")
    (call,) = (
        node
        for node in ast.walk(ast.parse(answer["script"]))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "load_recipe"
    )
    name, settings = map(ast.literal_eval, call.args)
    of_script = load_recipe(name, settings)
    assert (of_script.data, of_script.adapter, of_script.model) == (recipe.data, recipe.adapter, recipe.model)


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl")
def test_the_lines_for_trl_train(asked, forks, tmp_path):
    lines = answering.estimate(asked(length="128"), lambda text: None)["script"]
    done = forks.run(with_smaller_recipes(lines, tmp_path, "YOUR_DATA.jsonl"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "'train_loss'" in done.stdout


def test_what_the_gpu_cannot_run_is_refused_as_by_the_command(asked):
    with pytest.raises(UserError, match="at most what the model takes, 1024"):
        answering.estimate(asked(length="2048"), lambda text: None)


def test_lengths_end_where_the_model_does_or_the_budget(asked):
    answer = answering.find_longest_rows(asked(gpu="", budget="1"), lambda text: None)
    now, more = answer["now"], answer["with_one_gib_more"]
    assert (now.tokens, now.over_tokens, now.most_tokens) == (1024, None, 1024)
    assert more.tokens == 1024
    assert "the longest that the model takes" in views.lengths_html(answer)
    assert "One GiB more buys nothing" in views.lengths_html(answer)


def test_no_connection_is_made():
    with pytest.raises(PermissionError, match="makes no connections"):
        answering._refuse_connections("socket.connect", (None, ("example.com", 80)))
    answering._refuse_connections("open", ("file", "r", 0))
