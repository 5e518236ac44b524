"""Answers at evaluations as an estimate and a rehearsal count them."""

from __future__ import annotations

import pytest

from lowmem_ft.foundation.upstream.torch_version import TORCH_VERSION
from lowmem_ft.planning.estimator import estimate_memory, traced_answers
from lowmem_ft.planning.rehearsal import rehearse
from lowmem_ft.recipe import load_recipe

WITHOUT_LOSS = ("data.eval_size=null", "training.eval_steps=null", "training.use_cpu=false")


@pytest.fixture
def recipe(tmp_path):
    """The tiny recipe without held-out rows, and with prompts of a file."""
    (tmp_path / "prompts.txt").write_text("Hello\nWhat is the capital of Norway?\n")
    folder = f"training.output_dir={tmp_path / 'run'}"

    def load(*settings):
        return load_recipe("tiny", [folder, *WITHOUT_LOSS, *settings])

    return load, f"training.generation_prompts={tmp_path / 'prompts.txt'}"


def test_the_cache_of_the_longest_answer_is_counted(recipe):
    """Keys and values of a token are 2 layers x 2 heads x 8 numbers x 2, in float32: 256 bytes."""
    load, prompts = recipe
    most = {
        new_tokens: estimate_memory(
            load(prompts, f"training.max_new_tokens={new_tokens}"), "rtx-4090"
        ).by_phase["evaluation"]
        for new_tokens in (8, 72)
    }
    assert most[72] - most[8] >= 64 * 256
    assert "evaluation" not in estimate_memory(load(), "rtx-4090").by_phase


def test_the_longest_answer_that_a_row_can_begin_is_traced(recipe, monkeypatch):
    """Its last two tokens apart, it is the prompt: a row of 128 tokens, and six of the eight new ones."""
    load, prompts = recipe
    lengths, generate = [], traced_answers.generate_greedily

    def noted(session, prompt_BT, *args, **kwargs):
        lengths.append(prompt_BT.shape[1])
        return generate(session, prompt_BT, *args, **kwargs)

    monkeypatch.setattr(traced_answers, "generate_greedily", noted)
    estimate_memory(load(prompts, "data.max_length=128", "training.max_new_tokens=8"), "rtx-4090")
    assert set(lengths) == {128 + 8 - 2}


def test_inputs_of_answers_are_on_the_device_where_weights_are_streamed(recipe):
    load, prompts = recipe
    streamed = load(prompts, "adapter.name=lora", "offload.parameters=stream")
    estimate = estimate_memory(streamed, "rtx-4090")
    assert estimate.by_phase["evaluation"] > 0
    kernels = [said for said in estimate.choices if "attention: unfused" in said]
    if TORCH_VERSION < (2, 14):  # whose memory-efficient kernel takes no groups of heads
        assert len(kernels) == 1
        assert kernels[0].startswith("answers: ")  # the step has another kernel
    else:
        assert not kernels
    assert not any("generation/" in said for said in estimate.choices)


@pytest.mark.slow
def test_a_rehearsal_counts_every_answer_of_the_run(recipe):
    load, prompts = recipe
    answers = {
        new_tokens: rehearse(
            load(prompts, f"training.max_new_tokens={new_tokens}", "training.max_steps=2"), "rtx-4090"
        ).time.evaluations
        for new_tokens in (2, 102)
    }
    assert answers[102] > 20 * answers[2] > 0  # 101 passes over a token to 1, beside the pass over the prompt
