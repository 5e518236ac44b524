"""The card of a finished model: what the hub reads of it, and what stays on this machine."""

from __future__ import annotations

import pytest
from huggingface_hub import ModelCard

from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.evaluation.held_out_loss import EvaluationResult
from lowmem_ft.training.export.model_card import model_card


@pytest.fixture
def card():
    def write(recipe, *settings) -> ModelCard:
        evaluation = EvaluationResult(loss=1.25, num_label_tokens=10)
        text = model_card(
            load_recipe(recipe, list(settings)), steps=7, tokens=1234, loss=1.5, evaluation=evaluation
        )
        return ModelCard(text)

    return write


def test_what_comes_from_the_hub_is_named_as_the_hub_reads_it(card):
    found = card("7b-lora", "data=HuggingFaceH4/ultrachat_200k").data
    assert found.base_model == "Qwen/Qwen2.5-7B"
    assert found.base_model_relation == "adapter"
    assert found.datasets == ["HuggingFaceH4/ultrachat_200k"]
    assert found.library_name == "peft"
    assert {"lowmem_ft", "lora"} <= set(found.tags)


def test_what_lies_on_this_machine_is_not_named(card, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    data, folder = tmp_path / "chats.jsonl", tmp_path / "run"
    settings = (
        f"model={tmp_path / 'base'}",
        "model.weights=pretrained",
        f"data={data}",
        f"data.eval_path={data}",
    )
    made = card("tiny", *settings, "data.eval_size=null", f"training.output_dir={folder}")
    assert str(tmp_path) not in str(made)
    assert made.data.base_model is None
    assert made.data.datasets is None
    assert made.data.license == "apache-2.0"
    assert "Fine-tuned from a local model on\nlocal data" in str(made)


def test_a_card_says_what_came_out_and_what_was_chosen_and_is_short(card):
    text = str(card("7b-lora"))
    for line in (
        "| optimizer steps | 7 |",
        "| held-out loss (nats per token) | 1.2500 |",
        "learning_rate:",
        "  r: 16",
    ):
        assert line in text
    assert "#" not in text.partition("## Settings")[2]
    assert len(text) < 2000


def test_weights_made_at_random_come_from_no_model(card):
    assert card("7b-lora", "model.weights=random").data.base_model is None
