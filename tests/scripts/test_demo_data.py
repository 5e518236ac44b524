import json
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TRAIN_FILE, HELDOUT_FILE = (
    REPOSITORY / "recipes" / "demo" / f"{name}.jsonl" for name in ("train", "heldout")
)

ANSWER = """Short answer: Press here.
1. Look.
2. Press.
3. Wait.
Costs: a second.
Frees: the door."""


@pytest.fixture(autouse=True)
def _demo_scripts_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "demo")
    yield
    sys.modules.pop("answer_style", None)


def conversations(file: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in file.read_text("utf-8").splitlines()]


def content_of(role: str, file: Path) -> list[str]:
    return [turn["content"] for messages in conversations(file) for turn in messages if turn["role"] == role]


def answer_lines(answer: str) -> set[str]:
    """The lines of an answer without their labels and numbers."""
    return {line.split(" ", 1)[1].removeprefix("answer: ") for line in answer.split("\n")}


@pytest.mark.parametrize("file", [TRAIN_FILE, HELDOUT_FILE], ids=["train", "heldout"])
def test_every_example_is_one_question_and_one_answer_in_the_style(file):
    from answer_style import follows_style

    for messages in conversations(file):
        roles = [turn["role"] for turn in messages]
        assert roles in (["user", "assistant"], ["system", "user", "assistant"])
        assert follows_style(messages[-1]["content"]), messages


def test_nothing_leaks_from_the_training_data_into_the_held_out_data():
    train_questions, heldout_questions = content_of("user", TRAIN_FILE), content_of("user", HELDOUT_FILE)
    assert not set(train_questions) & set(heldout_questions)

    train_lines = set().union(*map(answer_lines, content_of("assistant", TRAIN_FILE)))
    heldout_lines = set().union(*map(answer_lines, content_of("assistant", HELDOUT_FILE)))
    assert train_lines
    assert not train_lines & heldout_lines


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "Press the button, then wait.",
        ANSWER.removesuffix("\nFrees: the door."),
        ANSWER.replace("3. Wait.", "4. Wait."),
        ANSWER.replace("\nCosts: a second.\nFrees: the door.", "\nFrees: the door.\nCosts: a second."),
        ANSWER.replace("Press here.", ""),
        ANSWER + "\nAnything else?",
        ANSWER.replace("2. Press.", "2. Press.\nAnd press again."),
    ],
    ids=["empty", "prose", "cut", "misnumbered", "swapped", "no answer", "chatty", "broken line"],
)
def test_other_shapes_are_not_the_style(wrong):
    from answer_style import follows_style

    assert follows_style(f"\n{ANSWER}\n")
    assert not follows_style(wrong)
