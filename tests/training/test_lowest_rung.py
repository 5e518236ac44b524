"""A real model at the lowest rung of the ladder learns as the plain run does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ladder_rungs import RUNGS, settings_of

from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.run.loop import train

NUM_STEPS = 20
DEMO = Path(__file__).parents[2] / "scripts" / "demo"


@pytest.fixture
def model_dir(monkeypatch):
    """SmolLM2-135M-Instruct, downloaded unless it is in the cache."""
    monkeypatch.syspath_prepend(DEMO)
    import get_demo_model

    yield get_demo_model.get_demo_model(get_demo_model.default_cache_dir())
    sys.modules.pop("get_demo_model")


def losses_of(rung, model_dir, output_dir, metrics):
    train(
        load_recipe(
            "demo",
            [
                f"model={model_dir}",
                "data.max_length=256",
                "training.use_cpu=true",
                "training.per_device_train_batch_size=1",
                "training.gradient_accumulation_steps=2",
                f"training.max_steps={NUM_STEPS}",
                "training.eval_steps=null",
                "training.save_steps=null",
                f"training.output_dir={output_dir}",
                *settings_of(rung),
            ],
        )
    )
    return metrics(output_dir)


@pytest.mark.slow
def test_smollm2_at_the_lowest_rung_has_the_plain_runs_losses(model_dir, tmp_path, metrics):
    plain = losses_of(RUNGS[0], model_dir, tmp_path / "plain", metrics)
    lowest = losses_of(RUNGS[-1], model_dir, tmp_path / "lowest", metrics)
    drop = sum(plain[:4]) / 4 - sum(plain[-4:]) / 4
    assert drop > 0.3
    assert lowest == pytest.approx(plain, abs=0.03 * drop)
