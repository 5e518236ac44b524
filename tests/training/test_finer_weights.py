"""A float32 checkpoint trained with bfloat16 weights: their masters begin with all that it holds."""

from __future__ import annotations

import pytest
import torch
from ladder_rungs import RUNGS, settings_of
from tiny_models import model_of

from lowmem_ft.training.run.loop import TrainingRun

LOST = {"fp32": 0.0, "split16": 0.0, "split24": 2.0**-15}
"""Of a value, relative."""


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with float32 weights."""
    model = model_of()
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model", dict(model.named_parameters())


def assert_begun_with(weights, run, lost):
    session = run.session
    with session.techniques.at_rest():
        for name, parameter in session.unwrapped_model.named_parameters():
            optimizer = session.optimizer
            kept = {key: optimizer.state[parameter][key] for key in optimizer.master_of(parameter).tensors}
            flat = parameter.detach().flatten()
            value = optimizer.master_of(parameter).read(flat, kept)
            torch.testing.assert_close(value, weights[name].detach().flatten(), rtol=lost, atol=0)
            one_unit = 2.0**-7  # a tie may have been rounded either way
            torch.testing.assert_close(flat, value.bfloat16(), rtol=one_unit, atol=0)
    session.close()


@pytest.mark.parametrize("master", LOST)
def test_masters_begin_with_the_checkpoint(master, checkpoint, tiny, recipes_folder):
    folder, weights = checkpoint
    run = TrainingRun.build(
        tiny(
            f"model={folder}",
            "model.weights=pretrained",
            f"model.tokenizer_name_or_path={recipes_folder / 'tiny'}",
            "model.dtype=bfloat16",
            f"optimizer.master={master}",
        )
    )
    assert_begun_with(weights, run, LOST[master])


def test_masters_that_wait_on_the_host_begin_with_it_too(checkpoint, tiny, recipes_folder):
    folder, weights = checkpoint
    lowest = [setting for setting in settings_of(RUNGS[-1]) if not setting.startswith("tiling")]
    run = TrainingRun.build(
        tiny(
            f"model={folder}",
            "model.weights=pretrained",
            f"model.tokenizer_name_or_path={recipes_folder / 'tiny'}",
            *lowest,
        )
    )
    assert_begun_with(weights, run, LOST["split24"])
