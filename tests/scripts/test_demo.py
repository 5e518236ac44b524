import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import TINY, model_of
from transformers import AutoModelForCausalLM, AutoTokenizer

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def demo(monkeypatch, tmp_path):
    """The demo as a module, writing its run below a temporary folder."""
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "demo")
    monkeypatch.delitem(sys.modules, "demo", raising=False)  # the folder, from which other scripts import
    import demo

    monkeypatch.setattr(demo, "RUN_DIR", tmp_path / "runs" / "demo")
    yield demo
    for name in ("demo", "answer_style", "get_demo_model"):
        sys.modules.pop(name, None)


@pytest.fixture
def tiny_model(tmp_path):
    """The one with a tokenizer: the demo asks it questions."""
    folder = tmp_path / "tiny"
    model_of().save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


def test_the_questions_are_held_out_and_enough(demo):
    questions = demo.heldout_questions(demo.NUM_ASKED)

    assert len(set(questions)) == demo.NUM_ASKED >= demo.NUM_SHOWN
    train_data = (REPOSITORY / "recipes" / "demo" / "train.jsonl").read_text("utf-8")
    assert not any(question in train_data for question in questions)


def test_each_question_gets_the_answer_it_gets_alone(demo, tiny_model):
    questions = ["How do I boil an egg?", "Why?"]

    together = demo.ask(tiny_model, questions)

    assert together == [demo.ask(tiny_model, [question])[0] for question in questions]


def test_a_failed_run_ends_the_demo_with_its_exit_code(demo, tiny_model, monkeypatch, capsys):
    monkeypatch.setattr(demo.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 3))

    assert demo.main(["--model", str(tiny_model)]) == 3
    assert "4 of 4" not in capsys.readouterr().out


def test_a_folder_without_a_model_is_a_user_error(demo, tmp_path, capsys):
    assert demo.main(["--model", str(tmp_path)]) == 2
    assert "--model needs a folder with a config.json" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_demo_runs_twice_with_a_tiny_model(demo, tiny_model, capsys):
    for _ in range(2):
        assert demo.main(["--model", str(tiny_model)]) == 0
        before, *_, after = demo.heldout_losses()
        assert after < before
        assert f"{before:.3f}" in (shown := capsys.readouterr().out)
        assert f"{after:.3f}" in shown
    AutoModelForCausalLM.from_pretrained(demo.RUN_DIR / "model")
