"""``${...}`` in a recipe file: its folder and its own keys, never the environment of whoever reads it."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from lowmem_ft.foundation.errors import RecipeError
from lowmem_ft.recipe import load_recipe, recipe_to_yaml

SECRET = "hunter2"
MODEL = "model: {name_or_path: some/model}\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a recipe file on a machine with a secret in its environment, and with a resolver of somebody's own."""
    monkeypatch.setenv("TOKEN", SECRET)
    OmegaConf.register_resolver("mine", lambda: SECRET, replace=True)

    def write_recipe(text, name="it.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    yield write_recipe
    OmegaConf.clear_resolver("mine")


def problems_of(path, *overrides):
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    assert SECRET not in str(caught.value)
    return caught.value.problems


@pytest.mark.parametrize(
    "written",
    [
        "${oc.env:TOKEN}",
        "run-${oc.env:TOKEN}",
        "${oc.env:TOKEN,nothing}",
        "${ oc.env : TOKEN }",
        "${oc.decode:${oc.env:TOKEN}}",
        "${oc.select:name,${oc.env:TOKEN}}",
        "${oc.create:${oc.env:TOKEN}}",
        "${${data.split}:TOKEN}",
        "${data.${oc.env:TOKEN}}",
        "${mine:}",
        r"\\${oc.env:TOKEN}",
        "${oc.env:TOKEN",
    ],
)
def test_a_file_asks_no_resolver(write, written):
    path = write(f"data: {{split: oc.env}}\ntraining: {{run_name: '{written}'}}\n{MODEL}")
    (problem,) = problems_of(path)
    assert str(path) in problem


def test_what_is_refused_is_named_with_its_key_and_the_ways_out(write):
    path = write(f"training: {{run_name: '${{oc.env:TOKEN}}'}}\n{MODEL}")
    assert problems_of(path) == (
        f"{path}: training.run_name: ${{oc.env:TOKEN}} calls the resolver oc.env. In a recipe file, which may come "
        "from others, ${...} can only name recipe_dir or a key of the same file. Write the value, or set "
        r"training.run_name=... on the command line; \${ writes the characters themselves.",
    )
    assert load_recipe(path, ["training.run_name=mine"]).training.run_name == "mine"


def test_all_of_them_are_told_with_the_files_other_mistakes(write):
    path = write(
        "name: ${oc.env:TOKEN}\n"
        "adapter: ${oc.env:TOKEN}\n"
        "data: {data_files: [a, '${oc.env:TOKEN}'], path: '${oc.env:TOKEN}'}\n"
        "training: {lr_scheduler_kwargs: {deep: {er: '${oc.env:TOKEN}'}}, max_steps: 0}\n"
        f"{MODEL}"
    )
    told = [problem.removeprefix(f"{path}: ").split(":")[0].split(" ")[0] for problem in problems_of(path)]
    assert sorted(told) == [
        "adapter",
        "data.data_files[1]",
        "data.path",
        "name",
        "training.lr_scheduler_kwargs.deep.er",
        "training.max_steps",
    ]


def test_a_key_of_a_mapping_is_text_and_no_reference(write):
    path = write(MODEL + "training: {lr_scheduler_kwargs: {'${oc.env:TOKEN}': 1}}\n")
    (problem,) = problems_of(path)
    assert "${oc.env:TOKEN}" in problem  # no argument of the schedule


def test_a_base_is_held_to_the_same_rule_unless_the_file_sets_the_key(write):
    write(MODEL + "training: {run_name: '${oc.env:TOKEN}'}\n", "base.yaml")
    (problem,) = problems_of(write("base: base.yaml\n"))
    assert "base.yaml: training.run_name: ${oc.env:TOKEN} calls" in problem
    assert load_recipe(write("base: base.yaml\ntraining: {run_name: b}\n")).training.run_name == "b"


def test_keys_of_the_same_file_are_read_whole_in_text_and_in_lists(write, tmp_path):
    recipe = load_recipe(
        write(
            "name: it\n"
            "model: {name_or_path: '${recipe_dir}/m', tokenizer_name_or_path: '${model.name_or_path}'}\n"
            "data: {data_files: ['${name}.jsonl', '${data.split}'], split: x, max_length: '${training.seed}'}\n"
            "training: {seed: 7, output_dir: 'runs/${name}-${training.seed}'}\n"
        )
    )
    assert recipe.model.tokenizer_name_or_path == recipe.model.name_or_path == f"{tmp_path}/m"
    assert recipe.data.data_files == ["it.jsonl", "x"]
    assert recipe.data.max_length == 7
    assert recipe.training.output_dir == "runs/it-7"


@pytest.mark.parametrize(
    "written,words",
    [
        ("${training.run_nam}", "is not a key of this file. Did you mean `training.run_name`"),
        ("${training.run_name}", "holds no reference but ${recipe_dir}, got ${training.run_name}"),
        ("${training}", "must name a text, a number or a switch"),
        ("a ${optimizer.betas}", "must name a text, a number or a switch, got [0.9, 0.95]"),
        ("${training.seed.x}", "is not a key of this file"),
        ("${optimizer.betas[1]}", "is not a key of this file"),
        ("${.seed}", "is not a key of this file"),
        ("${a b}", "cannot be read as a recipe"),
    ],
)
def test_a_reference_to_nothing_is_told(write, written, words):
    path = write(f"training: {{run_name: '{written}', seed: 1}}\noptimizer: {{betas: [0.9, 0.95]}}\n{MODEL}")
    assert any(words in problem for problem in problems_of(path))


def test_text_after_a_backslash_stays_text_through_every_file_that_is_written(write, tmp_path):
    path = write(MODEL + r"training: {run_name: '\${oc.env:TOKEN}'}" + "\n")
    for _ in range(2):  # what a run, and plan --write, put beside what they made
        recipe = load_recipe(path)
        assert recipe.training.run_name == "${oc.env:TOKEN}"
        path = write(recipe_to_yaml(recipe), "written.yaml")


def test_the_command_line_is_the_shells_and_stays_as_typed(write):
    text = "${oc.env:TOKEN}"
    recipe = load_recipe(write(MODEL), [f"data.data_files=['{text}']", f"training.run_name={text}"])
    assert (recipe.data.data_files, recipe.training.run_name) == ([text], text)
    assert "must be a whole number" in problems_of(write(MODEL), f"training.seed={text}")[0]


@pytest.mark.parametrize(
    "text",
    [
        "name: !!python/object/apply:os.system [touch it_ran]\n",
        "name: !!python/object/new:os.system [touch it_ran]\n",
        "name: !!python/name:os.system\n",
        "name: !!python/module:os\n",
        "!!python/object/apply:os.system [touch it_ran]: 1\n",
    ],
)
def test_a_tag_of_yaml_makes_no_object_of_python(write, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (problem,) = problems_of(write(text))
    assert "not YAML" in problem
    assert not (tmp_path / "it_ran").exists()
