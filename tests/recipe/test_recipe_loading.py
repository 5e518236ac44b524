from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import LIMIT_SECONDS

from lowmem_ft.foundation.errors import RecipeError
from lowmem_ft.recipe import Recipe, load_recipe, recipe_to_yaml
from lowmem_ft.recipe.reading.keys import (
    SHORT_FORMS,
    describe_type,
    recipe_keys,
)

MINIMAL = "model: {name_or_path: some/model}\n"


@pytest.fixture
def write(tmp_path: Path):
    def write_recipe(text: str = MINIMAL, name: str = "mine.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_recipe


def problems_of(path: str | Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    assert caught.value.exit_code == 2
    return caught.value.problems


def test_the_file_sets_what_it_names_and_defaults_the_rest(write):
    recipe = load_recipe(write(MINIMAL + "training: {learning_rate: 1e-5, seed: 7}\n"))
    assert recipe.name == "mine"
    assert recipe.model.name_or_path == "some/model"
    assert recipe.training.learning_rate == 1e-5
    assert recipe.training.seed == 7
    assert recipe.training.lr_scheduler_type == "cosine"


@pytest.mark.parametrize(
    "text, is_said", [("'out'", True), ('"out"', True), ("the 'best' out", False), ("'", False)]
)
def test_quotes_that_become_part_of_a_name_are_said(write, caplog, text, is_said):
    recipe = load_recipe(write("model: {name_or_path: tiny}"), [f"training.output_dir={text}"])
    assert recipe.training.output_dir == text
    assert [
        f"training.output_dir={text}: the quotes are part of the value" in said for said in caplog.messages
    ] == ([True] if is_said else [])


def test_a_later_setting_goes_before_an_earlier_one_and_a_contradiction_is_said(write, caplog):
    path = write(MINIMAL + "training: {seed: 1}\n")
    assert load_recipe(path, ["training.seed=2", "training.seed=3"]).training.seed == 3
    assert caplog.messages == ["training.seed is set twice, to 2 and to 3; 3 counts."]
    caplog.clear()
    assert load_recipe(path, ["data=a", "training.seed=3", "data.path=a"]).training.seed == 3
    assert caplog.messages == []


WITHOUT_UPPER_END = (
    "training.learning_rate",
    "training.max_grad_norm",
    "optimizer.eps",
    "optimizer.weight_decay",
    "adapter.lora_alpha",
    "data.eval_size",  # compared with the examples there are
    "training.warmup_steps",  # compared with the steps of the run
    "training.profile_steps",  # likewise
)


@pytest.mark.parametrize("value", [10**20, -(10**20), "1e30", ".nan", ".inf", "-.inf"])
def test_no_extreme_number_gets_through_or_breaks_a_rule(value):
    """Of any key that takes numbers, alone, in a list and in a mapping."""
    numeric = {path: key for path, key in recipe_keys().items() if "number" in describe_type(key.type_hint)}
    assert len(numeric) > 30
    for path, key in numeric.items():
        setting = f"{path}={f'[{value}, {value}]' if 'tuple' in str(key.type_hint) else value}"
        if value in (10**20, "1e30") and path in WITHOUT_UPPER_END:
            continue  # a number like others
        problems: tuple[str, ...] = ()
        try:
            load_recipe(None, ["model=x", "adapter.name=lora", setting])
        except RecipeError as error:
            problems = error.problems
        assert any(path in problem for problem in problems), (
            f"{setting} is not refused: give it an end in its config's problems(), or, if it has none upwards, a "
            f"place in WITHOUT_UPPER_END; problems told: {problems}"
        )


@pytest.mark.parametrize(
    "setting,key,value",
    [
        ("training.learning_rate=3e-4", "training.learning_rate", 3e-4),
        ("training.warmup_steps=10", "training.warmup_steps", 10.0),
        ("training.max_grad_norm=null", "training.max_grad_norm", None),
        ("training.overwrite_output_dir=true", "training.overwrite_output_dir", True),
        ("training.mixed_precision=no", "training.mixed_precision", "no"),
        ("training.report_to=[wandb, tensorboard]", "training.report_to", ("wandb", "tensorboard")),
        ("training.lr_scheduler_kwargs={num_cycles: 2}", "training.lr_scheduler_kwargs", {"num_cycles": 2}),
        ("optimizer.betas=[0.9, 0.95]", "optimizer.betas", (0.9, 0.95)),
        ("optimizer.state=8bit", "optimizer.state", "8bit"),
        (
            "optimizer.state={exp_avg: bf16, exp_avg_sq: fp32}",
            "optimizer.state",
            {"exp_avg": "bf16", "exp_avg_sq": "fp32"},
        ),
        ("optimizer.state.exp_avg=8bit", "optimizer.state", {"exp_avg": "8bit"}),
        ("data.data_files=[a.jsonl, b.jsonl]", "data.data_files", ["a.jsonl", "b.jsonl"]),
        # Text stays as typed, whatever YAML would make of it.
        ("model.revision=1e5", "model.revision", "1e5"),
        ("model.revision=0123", "model.revision", "0123"),
        ("data.path=*.jsonl", "data.path", "*.jsonl"),
        ("data.system_prompt=You are: brief. a=b ${x}", "data.system_prompt", "You are: brief. a=b ${x}"),
        ("model=other/model", "model.name_or_path", "other/model"),
        ("data=chats.jsonl", "data.path", "chats.jsonl"),
        ("budget=24GiB", "budget.device", "24GiB"),
    ],
)
def test_a_setting_is_read_in_the_type_of_its_key(write, setting, key, value):
    overrides = [setting]
    if "kwargs" in key:
        overrides.append("training.lr_scheduler_type=cosine_with_restarts")
    group, _, name = key.partition(".")
    assert getattr(getattr(load_recipe(write(), overrides), group), name) == value


def test_a_key_inside_a_mapping_can_be_set(write):
    recipe = load_recipe(
        write(),
        ["training.lr_scheduler_type=cosine_with_min_lr", "training.lr_scheduler_kwargs.min_lr_rate=0.1"],
    )
    assert recipe.training.lr_scheduler_kwargs == {"min_lr_rate": 0.1}


def test_formats_by_average_survive_being_written_and_read_again(write, tmp_path):
    recipe = load_recipe(write(MINIMAL + "optimizer: {state: {exp_avg: bf16, exp_avg_sq: 8bit}}\n"))
    (tmp_path / "again.yaml").write_text(recipe_to_yaml(recipe))
    assert load_recipe(tmp_path / "again.yaml").optimizer.state == {"exp_avg": "bf16", "exp_avg_sq": "8bit"}


def test_a_bare_no_in_yaml_is_the_choice_of_that_name(write):
    assert load_recipe(write(MINIMAL + "training: {mixed_precision: no}\n")).training.mixed_precision == "no"


def test_a_group_with_nothing_in_it_keeps_its_defaults(write):
    assert load_recipe(write(MINIMAL + "training:\n  # seed: 3\n")).training.seed == 42


@pytest.mark.parametrize(
    "wrong,meant",
    [
        ("trainig.learning_rate", "training.learning_rate"),
        ("learning_rate", "training.learning_rate"),
        ("weight_decay", "optimizer.weight_decay"),
        ("training.weight_decay", "optimizer.weight_decay"),
    ],
)
def test_an_unknown_key_says_which_one_was_meant(write, wrong, meant):
    expected = f"{wrong} is not a recipe key. Did you mean `{meant}`?"
    assert problems_of(write(), f"{wrong}=1") == (expected,)


def test_short_forms_lead_to_keys_that_exist():
    assert set(SHORT_FORMS.values()) <= set(recipe_keys())


@pytest.mark.parametrize(
    "setting,problem",
    [
        ("training.seed=1.5", "training.seed must be a whole number; got 1.5."),
        ("training.eval_steps=x", "training.eval_steps must be a whole number, or null; got 'x'."),
        (
            "training.mixed_precision=bf61",
            "training.mixed_precision must be one of no, bf16, fp16; got 'bf61'. Did you mean `bf16`?",
        ),
        (
            "training.report_to=wandb",
            "training.report_to must be a list such as [tensorboard], each one of tensorboard, wandb, trackio; "
            "got 'wandb'.",
        ),
        (
            "optimizer.betas=[0.9]",
            "optimizer.betas must be a list of 2, such as [0.9, 0.9], or null; got [0.9].",
        ),
        (
            "optimizer.state.exp_avg=fp8",
            "optimizer.state must be one of fp32, bf16, 8bit or a mapping such as {key: fp32}; got {'exp_avg': 'fp8'}.",
        ),
        (
            "optimizer.state.exp_av=bf16",
            "optimizer.state names running averages of optimizer.name=adamw, which has exp_avg and exp_avg_sq; got "
            "exp_av. Set optimizer.state.exp_avg, or one format for all.",
        ),
        ("data.data_files=[a", "data.data_files must be a list such as [a], each text, or null; got [a."),
        ("training.learning_rate.x=1", "training.learning_rate must be a number; got {'x': 1}."),
        (
            "tiling=3",
            "tiling is a group of settings, got '3'. Write tiling.KEY=3 with one of its keys: mlp, head.",
        ),
    ],
)
def test_a_wrong_type_says_what_is_expected_and_what_was_seen(write, setting, problem):
    assert problems_of(write(), setting) == (problem,)


def test_everything_wrong_is_reported_at_once_with_its_file(write):
    path = write("model: {nam: x}\ntraining: {learning_rat: 1, seed: abc, run_name: on}\nzz: 1\n")
    problems = problems_of(
        path, "training.learning_rate=-1", "model.dtype=bfloat16", "training.mixed_precision=fp16", "foo"
    )
    seen = "\n".join(problems)
    for fragment in (
        f"{path}: model.nam is",
        f"{path}: training.learning_rat is",
        f"{path}: training.seed must",
        f"{path}: training.run_name must be text, or null; got true. Put it in quotes",
        f"{path}: zz is",
        "got `foo`",
        "training.learning_rate must be a finite number above 0, got -1.0",
        "training.mixed_precision=fp16 needs model.dtype=float32, got bfloat16",
        "model.name_or_path must name a model",
    ):
        assert fragment in seen
    assert len(problems) == 9


def test_no_rule_is_applied_to_a_value_that_nobody_could_read(write):
    problems = problems_of(write(), "data.streaming=true", "training.max_steps=many")
    assert problems == ("training.max_steps must be a whole number; got 'many'.",)


def test_a_file_that_was_read_before_is_read_again_once_it_has_changed(write):
    path = write(MINIMAL + "training: {seed: 7}\n")
    assert load_recipe(path) == load_recipe(path)
    write(MINIMAL + "training: {seed: 8}\n")
    assert load_recipe(path).training.seed == 8


def test_a_missing_name_lists_the_shipped_recipes_and_the_settings_are_checked_too():
    missing, unknown = problems_of("7b-bf17", "learning_rate=1")
    assert "Did you mean `7b-bf16`" in missing
    assert "demo" in missing
    assert "training.learning_rate" in unknown


def test_recipe_dir_is_the_folder_of_the_file_that_says_it(write, tmp_path):
    write(MINIMAL + "data: {path: '${recipe_dir}/a.jsonl'}\n", name="deep/base.yaml")
    recipe = load_recipe(write("base: deep/base.yaml\ndata: {eval_path: '${recipe_dir}/b.jsonl'}\n"))
    assert recipe.data.path == str(tmp_path / "deep" / "a.jsonl")
    assert recipe.data.eval_path == str(tmp_path / "b.jsonl")


def test_a_base_is_extended_and_overridden_but_does_not_lend_its_name(write):
    write("name: a\ndescription: first\n" + MINIMAL + "training: {seed: 1, max_steps: 10}\n", name="a.yaml")
    write("base: a.yaml\ntraining: {seed: 2, logging_steps: 3}\n", name="b.yaml")
    recipe = load_recipe(
        write("base: b.yaml\ntraining: {seed: 3}\n", name="c.yaml"), ["training.max_steps=20"]
    )
    training = recipe.training
    assert (recipe.name, recipe.description) == ("c", "")
    assert (training.seed, training.logging_steps, training.max_steps) == (3, 3, 20)
    assert recipe.model.name_or_path == "some/model"


def test_a_shipped_recipe_can_be_extended_by_name(write):
    recipe = load_recipe(write("base: 7b-bf16\ntraining: {seed: 3}\n"))
    assert recipe.optimizer == load_recipe("7b-bf16").optimizer


TEXTS = [
    "no",
    "1e5",
    "a: b # c",
    "two\nlines\n",
    "${recipe_dir}",
    "\\${x}\\",
    "é '\"",
    " padded ",
    "null",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_being_written_and_read_again(tmp_path, text):
    recipe = load_recipe("tiny")
    data = type(recipe.data)(path="d.jsonl", system_prompt=text, data_files=[text, "b"])
    recipe = Recipe(name="t", description=text, model=recipe.model, data=data)
    path = tmp_path / "written.yaml"
    path.write_text(recipe_to_yaml(recipe), encoding="utf-8")
    assert load_recipe(path) == recipe


def test_what_is_needed_is_not_offered_as_null(write):
    assert problems_of(write(), "model=") == ("model.name_or_path is empty. Give it a value.",)


def test_loading_a_recipe_does_not_import_torch():
    code = (
        "import sys; from lowmem_ft import load_recipe; load_recipe('tiny');"
        "print({'torch', 'transformers', 'datasets'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.stdout.strip() == "set()", done.stderr
