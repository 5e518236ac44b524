"""A run on rows that are tokens already is the run on their text, resumed and estimated alike."""

from __future__ import annotations

import pytest
import torch
from chats_as_tokens import write_tokens
from safetensors.torch import load_file

from lowmem_ft import rehearse
from lowmem_ft.training.run.loop import train

SHORT = (
    "training.max_steps=6",
    "training.save_steps=3",
    "training.eval_steps=3",
    "training.lr_scheduler_type=constant",
)


@pytest.mark.parametrize("settings", [(), ("data.packing=true", "data.max_length=96")], ids=" ".join)
def test_tokens_are_trained_and_resumed_as_their_text(settings, tiny, metrics, tmp_path):
    text, tokens = tmp_path / "text", tmp_path / "tokens"
    file = write_tokens(tmp_path / "tokens.jsonl")
    expected = train(tiny(*SHORT, *settings, output_dir=text))
    train(tiny(*SHORT, *settings, file, "training.max_steps=3", output_dir=tokens))
    auto = "training.resume_from_checkpoint=auto"
    resumed = train(tiny(*SHORT, *settings, file, auto, output_dir=tokens))
    assert metrics(tokens) == metrics(text)
    assert resumed.evaluation == expected.evaluation
    ours, theirs = (load_file(one.model_folder / "model.safetensors") for one in (resumed, expected))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_tokens_are_rehearsed_as_their_text(tiny, tmp_path):
    file = write_tokens(tmp_path / "tokens.jsonl")
    ours, theirs = (rehearse(tiny(*SHORT, *data), "rtx-4090", steps=1) for data in ((file,), ()))
    for name in ("num_steps", "tokens", "label_tokens", "padded_tokens"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.estimate.allocated_peak_bytes == theirs.estimate.allocated_peak_bytes
    assert ours.worst.allocated_peak_bytes == theirs.worst.allocated_peak_bytes
