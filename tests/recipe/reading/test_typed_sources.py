"""``data.sources``: a list of mappings in YAML and on the command line, each key checked as in ``data``."""

from __future__ import annotations

import pytest

from lowmem_ft.foundation.errors import RecipeError
from lowmem_ft.recipe import load_recipe, recipe_to_yaml

YAML = """
model: {name_or_path: some/model}
data:
  split: valid
  sources:
    - {path: "${recipe_dir}/a.jsonl", weight: 2, max_samples: 10}
    - path: org/chats
      weight: 0.5
      split: train[:10%]
      data_files: [x.jsonl]
"""


def test_sources_are_read_from_a_file_and_written_again(tmp_path):
    (tmp_path / "mine.yaml").write_text(YAML)
    recipe = load_recipe(tmp_path / "mine.yaml")
    assert recipe.data.sources == [
        {"path": f"{tmp_path}/a.jsonl", "weight": 2, "max_samples": 10},
        {"path": "org/chats", "weight": 0.5, "split": "train[:10%]", "data_files": ["x.jsonl"]},
    ]
    (tmp_path / "again.yaml").write_text(recipe_to_yaml(recipe))
    assert load_recipe(tmp_path / "again.yaml").data == recipe.data


def test_sources_are_read_from_the_command_line():
    data = load_recipe(None, ["model=m", "data.sources=[{path: a.jsonl}, {path: b.jsonl, repeats: 2}]"]).data
    assert data.sources == [{"path": "a.jsonl"}, {"path": "b.jsonl", "repeats": 2}]


WRONG = {
    "a key": (
        "[{path: a}, {pth: b}]",
        r"data\.sources\[1\]\.pth is not a key of a source\. Did you mean `path`\?",
    ),
    "a share": ("[{path: a, wieght: 1}]", r"data\.sources\[0\]\.wieght is not .* Did you mean `weight`\?"),
    "another key of data": (
        "[{path: a, max_length: 9}]",
        r"\[0\]\.max_length is not a key of a source\. Set data\.max_",
    ),
    "a type": (
        "[{path: a, max_samples: x}]",
        r"data\.sources\[0\]\.max_samples must be a whole number, or null; got 'x'",
    ),
    "a choice": (
        "[{path: a, format: alpacca}]",
        r"data\.sources\[0\]\.format must be one of .*Did you mean `alpaca`",
    ),
    "a weight": (
        "[{path: a, weight: much}]",
        r"data\.sources\[0\]\.weight must be a number, or null; got 'much'",
    ),
    "a part": (
        "[{path: a, repeats: 1.5}]",
        r"data\.sources\[0\]\.repeats must be a whole number, or null; got 1.5",
    ),
    "paths": ("[a.jsonl, b.jsonl]", r"data\.sources must be a list of mappings such as .*got \['a.jsonl'"),
    "one": ("{path: a}", r"data\.sources must be a list of mappings"),
    "a rule": (
        "[{path: a, weight: -1}]",
        r"data\.sources\[0\]\.weight is above 0 and at most 1e\+09, got -1",
    ),
}


@pytest.mark.parametrize("value,words", WRONG.values(), ids=WRONG)
def test_what_is_wrong_in_a_source_is_named_by_its_path(value, words):
    with pytest.raises(RecipeError, match=words):
        load_recipe(None, ["model=m", f"data.sources={value}"])


def test_all_mistakes_in_sources_are_told_at_once():
    with pytest.raises(RecipeError) as caught:
        load_recipe(None, ["model=m", "data.sources=[{pth: a, weight: x}, {path: b, splt: c}]"])
    assert len(caught.value.problems) == 3


def test_sources_replace_the_recipes_path_and_a_path_its_sources(tmp_path):
    (tmp_path / "path.yaml").write_text(
        "model: {name_or_path: m}\ndata: {path: some/chats, eval_split: test}\n"
    )
    data = load_recipe(tmp_path / "path.yaml", ["data.sources=[{path: a.jsonl}]"]).data
    assert (data.path, data.eval_split, data.sources) == (None, None, [{"path": "a.jsonl"}])
    (tmp_path / "sources.yaml").write_text(YAML.replace("    - {path", "    - {path"))
    data = load_recipe(tmp_path / "sources.yaml", ["data=mine.jsonl"]).data
    assert (data.path, data.split, data.sources) == ("mine.jsonl", "train", None)
