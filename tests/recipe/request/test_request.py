"""One question is the same at three doors: typed as a command, chosen on the page, asked in Python."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from processes import LIMIT_SECONDS

from lowmem_ft.cli import main
from lowmem_ft.cli.estimating import estimate_recipe
from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.recipe.request.request import Request
from lowmem_ft.recipe.shipped.needs import needs_of_shipped_recipes
from lowmem_ft.ui import answering
from lowmem_ft.ui.form import FROM_RECIPE, Form
from lowmem_ft.ui.kept_files import KeptFiles

QUESTIONS, SEED = 50, 5

CHOICES = {
    "recipe": [
        name for name, needs in needs_of_shipped_recipes().items() if "x" not in needs.gpu.partition("-")[0]
    ],
    "model": [FROM_RECIPE, FROM_RECIPE, "llama-3.2-1b", "qwen3-8b", "smollm2-135m"],
    "length": ["", "", "512", "1500"],
    "rows": ["", "", "1", "3"],
    "gpu": [*load_gpus()],
    "budget": ["", "", "20", "7.5", "400"],
    "host": ["", "", "64"],
    "more": [
        "",
        "",
        "checkpointing.mode=full",
        "optimizer.name=sgd",
        "loss.chunk_tokens=512 training.seed=3",
    ],
}


def forms():
    draws = random.Random(SEED)
    return [
        Form(method="recipe", **{field: draws.choice(values) for field, values in CHOICES.items()})
        for _ in range(QUESTIONS)
    ]


def answer_of(ask):
    """The question as it was settled, or all that is wrong with it."""
    try:
        return ask()
    except UserError as error:
        return error.problems


@pytest.mark.parametrize("form", forms(), ids=lambda form: form.query)
def test_a_question_is_the_same_at_three_doors(form, tmp_path, monkeypatch, capsys):
    files, seen = KeptFiles(tmp_path), []
    for name in ("_estimate_on_one", "_estimate_on_all"):
        monkeypatch.setattr(estimate_recipe, name, lambda request, options: seen.append(request) or 0)
    words = [f"recipe={form.recipe}", *form.settings(files)]

    def in_python():
        request = Request.of("estimate", words, form.devices)
        request.check()
        return request

    asked = answering.Asked(
        method=form.method,
        recipe=form.recipe,
        settings=form.settings(files),
        of_method=(),
        devices=form.devices,
    )
    expected = answer_of(in_python)
    on_page = answer_of(lambda: answering._settled(asked, lambda doing: None)[0])
    exit_code = main(["estimate", *words, "--gpu", form.devices])
    assert on_page == expected
    if isinstance(expected, Request):
        assert (exit_code, seen) == (0, [expected])
    else:
        assert exit_code == 2
        said = " ".join(capsys.readouterr().err.split())
        assert all(" ".join(problem.split()) in said for problem in expected)


def test_most_of_the_questions_have_an_answer_and_some_have_none(tmp_path):
    files = KeptFiles(tmp_path)
    settled = []
    for form in forms():
        try:
            Request.of("estimate", [f"recipe={form.recipe}", *form.settings(files)], form.devices).check()
            settled.append(form)
        except UserError:
            continue
    assert 10 < len(settled) < QUESTIONS - 5


def test_all_that_is_wrong_is_told_at_once():
    def own():
        raise UserError("One of the caller's own.")

    request = Request.of("estimate", ["recipe=7b-lora", "data.max_length=100000000", "budget=4TiB"], "t4")
    with pytest.raises(UserError) as raised:
        request.check(own)
    assert raised.value.problems[0] == "One of the caller's own."
    assert len(raised.value.problems) >= 3


def test_a_question_is_settled_without_torch():
    code = (
        "import sys; from lowmem_ft.recipe.request.request import Request; "
        "Request.of('estimate', ['recipe=7b-lora'], 'rtx-4090').check(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.stdout == "False\n", done.stderr
